"""What pyproject.toml cannot say: the README of a package index, and patches/ inside
the wheel.
"""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup


def long_description() -> str:
    """The README for a package index, where links to files of the clone lead nowhere.

    They lead below ``DOCUMENTS_URL`` if a release is built with it, such as
    ``https://HOST/PROJECT/blob/TAG/``; else a link becomes its text with the path in
    the sdist.
    """
    url = os.environ.get("DOCUMENTS_URL")
    link = re.compile(r"(!?)\[([^\]]+)\]\((?!https?:)([^)#]+)(#[^)]*)?\)")
    put = rf"\1[\2]({url}\3\4)" if url else r"\2 (\3)"
    return link.sub(put, (Path(__file__).parent / "README.md").read_text())


setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    # patches/ stands at the top for its readers; a wheel has them too
    packages=[*find_packages(include=["megatron_muon*"]), "megatron_muon.patches"],
    package_dir={"megatron_muon.patches": "patches"},
)
