"""The models; `build` makes the one that a checkpoint's configuration describes."""

from aura.models import gpt, hrm


def build(config):
    """The module for a configuration as files hold it: a dict of the fields of GPTConfig or HRMConfig."""
    if "h_cycles" in config:
        return hrm.HRM(hrm.HRMConfig(**config))
    return gpt.GPT(gpt.GPTConfig(**config))
