"""The TPU kernel's tile sizes, on each chip's figures."""

import pytest

from recml_sasrec.heads import tiles

MIB = 2**20


@pytest.mark.parametrize("name", tiles.CHIPS)
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_chip_has_a_plan_for_the_reference_shapes_and_it_fits(name, width, itemsize):
    chip = tiles.CHIPS[name]
    for tokens in (1, 2_048, 4_096, 65_536, 1_000_000):
        plan = tiles.plan(tokens, 876_939, width, itemsize, chip)
        assert plan.vmem_bytes <= plan.vmem_limit <= chip.vmem_bytes
        assert plan.blocks * plan.block >= tokens and plan.block % plan.tokens == 0
        assert plan.tokens % plan.sub_tokens == 0 and plan.items % plan.sub_items == 0
        assert plan.items * plan.tokens <= 2**21
        assert plan.dh != "hbm" or plan.block >= 2 * plan.tokens


def test_dh_is_resident_while_it_fits_then_moves_to_hbm_then_the_tokens_are_cut_into_blocks():
    ways = [tiles.plan(tokens, 10**6, 128, 2, tiles.CHIPS["v4"]).dh for tokens in (4_096, 65_536, 1_000_000)]
    assert ways == ["resident", "hbm", "blocks"]
    assert tiles.plan(65_536, 10**7, 64, 2, tiles.CHIPS["v6e"]).dh == "resident"


def test_small_problems_get_small_tiles():
    plan = tiles.plan(1, 1, 1, 4, tiles.CHIPS["v5e"])
    assert (plan.items, plan.tokens, plan.block, plan.blocks) == (128, 128, 128, 1)


def test_overrides_are_rounded_up_to_what_the_hardware_addresses():
    plan = tiles.plan(5_000, 10_000, 64, 2, tiles.CHIPS["v6e"], tile=1_000, token_tile=200, block=600)
    assert (plan.items, plan.tokens, plan.dh, plan.block, plan.blocks) == (1_024, 256, "blocks", 768, 7)


def test_what_does_not_fit_says_what_would():
    with pytest.raises(
        ValueError, match=r"dh resident, needs .* MiB of VMEM and v4 has .* without overrides this would fit: v4"
    ):
        tiles.plan(65_536, 10**6, 128, 2, tiles.CHIPS["v4"], dh="resident")
    with pytest.raises(ValueError, match="implementation='xla'"):
        tiles.plan(128, 10**6, 10**5, 4, tiles.CHIPS["v4"])


def test_a_plan_prints_as_one_line():
    line = str(tiles.plan(4_096, 876_939, 128, 2, tiles.CHIPS["v6e"]))
    assert line.startswith("v6e: 4096 tokens, tile 2048 items x 1024 tokens") and "dh resident" in line


def test_without_a_tpu_in_sight_the_smallest_vmem_is_assumed():
    assert tiles.current_chip().vmem_bytes == 16 * MIB
