"""Packaging of megatron_muon: Distributed Muon for Megatron's DistributedOptimizer."""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r'__version__ = "(.+?)"', (here / "megatron_muon/version.py").read_text())
assert version is not None


def long_description() -> str:
    """The README for a package index, where links to files of the clone lead nowhere.

    They lead below ``DOCUMENTS_URL`` if a release is built with it, such as
    ``https://HOST/PROJECT/blob/TAG/``; else a link becomes its text with the path in the sdist.
    """
    url = os.environ.get("DOCUMENTS_URL")
    link = re.compile(r"(!?)\[([^\]]+)\]\((?!https?:)([^)#]+)(#[^)]*)?\)")
    put = rf"\1[\2]({url}\3\4)" if url else r"\2 (\3)"
    return link.sub(put, (here / "README.md").read_text())


setup(
    name="megatron-muon",
    version=version.group(1),
    description="Distributed Muon for Megatron: optimizer='muon' over the DistributedOptimizer",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    author="megatron_muon contributors",
    project_urls={
        "Paper": "https://arxiv.org/abs/2502.16982",
        "Proof of concept": "https://github.com/NVIDIA/Megatron-LM/pull/1428",
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    keywords=["megatron", "muon", "optimizer", "distributed training", "pretraining"],
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    # patches/ stands at the top for its readers; a wheel has them too
    packages=[*find_packages(include=["megatron_muon*"]), "megatron_muon.patches"],
    package_dir={"megatron_muon.patches": "patches"},
    package_data={
        "megatron_muon": ["py.typed"],
        "megatron_muon.patches": ["*.patch", "README.md"],
    },
    entry_points={"console_scripts": ["megatron-muon = megatron_muon.__main__:main"]},
    # No megatron-core: a Megatron-LM checkout brings its own, and pip would put a second one beside
    # it. Who has no checkout asks for [core].
    install_requires=["torch>=2.4"],
    extras_require={
        "core": ["megatron-core>=0.12,<0.21"],
        "te": ["transformer-engine[pytorch]"],
        # No extra for Apex: NVIDIA's is built from source, PyPI's package of that name is another.
        "lab": ["pandas", "tensorboard", "matplotlib"],
        "examples": ["matplotlib", "tensorboard", "tqdm"],
        "test": ["pytest", "pytest-timeout", "hypothesis", "ruff", "mypy"],
    },
)
