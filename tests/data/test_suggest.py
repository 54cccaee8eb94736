"""What prepare suggests: the settings chosen on validation for the logs they were chosen on, and sense elsewhere."""

import dataclasses

import numpy as np
import pytest
from event_helpers import store_of

from recml_sasrec.config import Config, get_field
from recml_sasrec.config_checks import validate
from recml_sasrec.config_file import load_config, set_value
from recml_sasrec.data.events import DataError
from recml_sasrec.data.loader import open_data
from recml_sasrec.data.suggest import Facts, facts_of, last_interval, suggest
from tests.test_config import CONFIGS

DAY = 86_400
# counted apart from this program, with numpy, in the files
BEAUTY = Facts(22_363, 12_101, 198_502, 8.9, 6, 14, 204, False, 0, 203, 131_413, 0, 0)
ML_100K = Facts(943, 1_682, 100_000, 106.0, 65, 245, 737, True, 874_724_710, 893_286_638, 97_171, 44, 90_000)
YAMBDA = Facts(
    9_238, 877_168, 46_467_212, 5_030.0, 3_004, 12_000, 60_000, True, 0, 26_000_000, 46_000_000, 8_000, 43_000_000
)


def config_of(facts: Facts) -> Config:
    config = Config()
    config.data.source, config.data.path = "store", "x"
    for name, suggested in suggest(facts).items():
        set_value(config, name, suggested.value)
    validate(config)
    return config


def test_beauty_gets_the_settings_that_were_chosen_on_its_validation_split():
    chosen = load_config(str(CONFIGS[0].with_name("beauty.py")))
    found = config_of(BEAUTY)
    found.data.source, found.data.path = chosen.data.source, chosen.data.path
    assert found == chosen


def test_ml_100k_gets_about_its_shipped_settings():
    chosen, found = load_config(str(CONFIGS[0].with_name("movielens100k.py"))), config_of(ML_100K)
    for name in ("data.length", "data.stride", "data.targets", "split.kind", "model.dropout", "model.width"):
        assert get_field(found, name) == get_field(chosen, name), name
    tokens = [config.train.steps * config.train.batch_size * config.data.length for config in (found, chosen)]
    assert 1 <= tokens[0] / tokens[1] <= 2  # its validation was still rising at its last step


def test_a_log_like_yambda_gets_long_rows_many_targets_and_one_clock():
    found = config_of(YAMBDA)
    assert (found.data.length, found.data.targets, found.data.stride) == (256, 8, 0)
    assert (found.model.width, found.train.batch_size, found.train.steps) == (128, 64, 30_000)
    assert (found.optimizer.warmup_steps, found.model.dropout) == (1_000, 0.2)
    assert found.split.kind == "temporal" and found.split.test_start % DAY == 0
    days = 26_000_000 / 30 / DAY
    assert days - 1 <= (26_000_000 - found.split.test_start) / DAY <= days + 1
    assert found.split.validation_length == 10 * DAY


@pytest.mark.parametrize("name", ["users", "items", "events", "mean", "median", "ninety", "inputs", "late_users"])
@pytest.mark.parametrize("factor", [1e-3, 0.1, 10, 1_000])
@pytest.mark.parametrize("facts", [BEAUTY, ML_100K, YAMBDA])
def test_what_is_suggested_is_always_a_valid_config(facts, name, factor):
    value = type(getattr(facts, name))(max(getattr(facts, name) * factor, 1))
    config = config_of(dataclasses.replace(facts, **{name: value}))
    inputs = facts.inputs if config.split.kind == "leave_last" else facts.late_inputs
    if name != "inputs":
        assert config.train.batch_size * config.data.length <= inputs


@pytest.mark.parametrize(("span", "length"), [(10, 1), (DAY, DAY // 30), (60 * DAY, 2 * DAY), (100 * DAY, 3 * DAY)])
def test_the_last_interval_is_about_a_thirtieth(span, length):
    first = 1_546_473_600 + 4_321
    start, found = last_interval(first, first + span)
    assert found == length and first + span - start + 1 >= length - DAY * (length >= 2 * DAY)
    assert start % DAY == 0 or length < 2 * DAY


def test_the_facts_are_those_of_a_plain_count():
    rng = np.random.default_rng(0)
    histories = []
    for _ in range(200):
        times = np.sort(rng.integers(0, 3_000, rng.integers(1, 30))).tolist()
        histories.append([(int(rng.integers(0, 50)), time) for time in times])
    facts = facts_of(store_of(histories))
    lengths = sorted(map(len, histories))
    assert (facts.users, facts.events, facts.longest) == (200, sum(lengths), lengths[-1])
    assert (facts.median, facts.ninety) == (lengths[99], lengths[179])
    assert facts.mean == round(sum(lengths) / 200, 1)
    assert facts.inputs == sum(max(n - 3, 0) if n > 2 else n - 1 for n in lengths)
    last = max(time for history in histories for _, time in history)
    first = min(time for history in histories for _, time in history)
    length = (last - first) // 30
    test, end = last + 1 - length, last + 1 - 2 * length
    trained = [[time for _, time in history if time < end] for history in histories]
    assert facts.late_inputs == sum(max(len(times) - 1, 0) for times in trained)
    late = [times and history[-1][1] >= test for times, history in zip(trained, histories, strict=True)]
    assert facts.late_users == sum(map(bool, late)) and facts.late_users > 20
    assert suggest(facts)["split.kind"].value == ("temporal" if facts.late_users >= 100 else "leave_last")


def test_custom_trains_on_the_events_of_the_log(shop):
    config = load_config(str(CONFIGS[0].with_name("custom.py")), [f"data.path={shop}"])
    table = load_config(str(CONFIGS[0].with_name("custom.py")), [f"data.path={shop}", "data.source=table"])
    table.data.path, table.data.cache = str(shop.parent / "log.csv"), str(shop.parent)
    table.data.user_column, table.data.item_column, table.data.time_column = "user", "item", ""
    a, b = (open_data(each) for each in (config, table))
    assert a.num_queries("test") == 40 and a.store.directory == str(shop)
    for mine, other in zip(a.train_source(config)[0], b.train_source(table)[0], strict=True):
        np.testing.assert_array_equal(mine, other)


def test_a_store_that_is_not_there_is_asked_for(shop):
    config = load_config(str(CONFIGS[0].with_name("custom.py")), [f"data.path={shop}"])
    config.data.path = "moved"
    with pytest.raises(DataError, match=r"path='moved' is not there; it must be the folder of a store, as written by"):
        open_data(config)


@pytest.mark.parametrize(
    ("histories", "sentence"),
    [([[(0, 1)] * 9], "1 item"), ([[(0, 1), (1, 2)]] * 9, "longest history"), ([[(0, 1)] * 3 + [(1, 1)]], "")],
)
def test_what_nothing_can_be_trained_on_is_refused(histories, sentence):
    store = store_of(histories)
    if not sentence:
        assert facts_of(store).inputs == 1
        return
    with pytest.raises(DataError, match=sentence):
        facts_of(store)
