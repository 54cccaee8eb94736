"""A run that starts from one that may know what is held out says so."""

import pytest

from recml_sasrec import grow
from recml_sasrec.config import Config, SplitConfig


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({}, {}, None),
        ({"kind": "temporal"}, {}, "config.split.kind=leave_last, was temporal"),
        ({}, {"test_last": 2}, "the last 3 events of a user are held out, were 2"),
        ({"test_last": 2}, {}, None),
        ({"kind": "temporal", "test_start": 90}, {"kind": "temporal", "test_start": 80}, "training ends at second 80"),
        ({"kind": "temporal", "test_start": 90}, {"kind": "temporal", "test_start": 99}, None),
        (
            {"kind": "temporal", "test_start": 90},
            {"kind": "temporal", "test_start": 99, "validation_length": 8, "gap": 1},
            "training ends at second 89, was 90",
        ),
    ],
)
def test_a_base_that_knows_what_is_held_out_is_told(before, now, words):
    base, config = Config(), Config()
    base.split = SplitConfig(**{"kind": "leave_last", **before})
    config.split = SplitConfig(**{"kind": "leave_last", **now})
    warning = grow._leak(config, base)
    assert warning is None if words is None else words in warning
