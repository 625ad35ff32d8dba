"""The report of ``megatron-muon compare``: a page, JSON and a figure."""
