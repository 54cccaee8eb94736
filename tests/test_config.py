"""A config can be overridden, saved and compared, and what is wrong with it is said in one sentence."""

import json
import pathlib

import pytest

from recml_sasrec.config import Config, ConfigError, first_difference, get_field
from recml_sasrec.config_checks import validate
from recml_sasrec.config_file import from_json, load_config, set_field, to_json

CONFIG_FILE = "from recml_sasrec.config import Config\ndef get_config():\n    c = Config()\n    {}\n    return c"
CONFIGS = sorted((pathlib.Path(__file__).parent.parent / "configs").glob("*.py"))


def shipped(path: pathlib.Path, shop: pathlib.Path) -> Config:
    """A shipped config; custom.py is given a store."""
    return load_config(str(path), [f"data.path={shop}"] if path.stem == "custom" else [])


def quickstart(*overrides: str) -> Config:
    return load_config(str(CONFIGS[0].with_name("quickstart.py")), overrides)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_config_is_valid_and_survives_json(path, shop):
    config = shipped(path, shop)
    assert from_json(to_json(config)) == config


def test_a_config_file_may_ask_for_the_path_of_its_data(shop):
    custom = str(CONFIGS[0].with_name("custom.py"))
    config = load_config(custom, ["data.path=other", f"data.path={shop}", "train.steps=7"])
    assert (config.data.path, config.data.source, config.train.steps) == (str(shop), "store", 7)
    with pytest.raises(ConfigError, match=r"give --config.data.path=FOLDER, what .*prepare --output wrote$"):
        load_config(custom)
    with pytest.raises(ConfigError, match=r"'nowhere' has no suggestion.json; write it with .* --output nowhere$"):
        load_config(custom, ["data.path=nowhere"])


def test_yambda50m_holds_to_the_published_protocol():
    config = load_config(str(CONFIGS[0].with_name("yambda50m.py")))
    split = config.split
    assert (config.data.length, config.data.targets, config.train.batch_size) == (256, 8, 64)
    assert split.test_start == 25_913_600
    assert split.test_start - split.gap == 25_911_800  # end of validation
    assert split.test_start - split.gap - split.validation_length == 25_825_400  # its start
    assert split.test_start - 2 * split.gap - split.validation_length == 25_823_600  # end of training
    assert not config.evaluation.filter_seen


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("optimizer.learning_rate=3e-4", "optimizer.learning_rate", 3e-4),
        ("optimizer.learning_rate=1", "optimizer.learning_rate", 1.0),
        ("train.steps=1e3", "train.steps", 1000),
        ("data.pack=false", "data.pack", False),
        ("head.name=dense_bce", "head.name", "dense_bce"),
        ("evaluation.ks=(5,10)", "evaluation.ks", (5, 10)),
        ("evaluation.ks=10", "evaluation.ks", (10,)),
        ("evaluation.decay_hours=1", "evaluation.decay_hours", (1.0,)),
        ("evaluation.knn_hours=(0,0.5)", "evaluation.knn_hours", (0.0, 0.5)),
        ("evaluation.baselines=item_knn", "evaluation.baselines", ("item_knn",)),
        ("evaluation.baselines=('most_pop', 'random')", "evaluation.baselines", ("most_pop", "random")),
        ("evaluation.baselines=()", "evaluation.baselines", ()),
        ("data.path=a=b.csv", "data.path", "a=b.csv"),
        ("data.organic_only=true", "data.organic_only", True),
    ],
)
def test_overrides_take_the_type_of_their_field(override, name, value):
    found = get_field(quickstart(override), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optimizer.learning_rat=1", "did you mean config.optimizer.learning_rate?"),
        ("optimiser.learning_rate=1", "did you mean config.optimizer.learning_rate?"),
        ("learning_rate=1", "did you mean config.optimizer.learning_rate?"),
        ("model=3", "is a section"),
        ("model.width.x=3", "is a field"),
        ("train.steps=1.5", "is not a whole number"),
        ("train.steps=inf", "is not a whole number"),
        ("train.steps=many", "is not a whole number"),
        ("train.steps=True", "is not a whole number"),
        ("optimizer.learning_rate=fast", "is not a number"),
        ("data.pack=perhaps", "write true or false"),
        ("head.name=cut_bc", "did you mean 'cut_bce'?"),
        ("evaluation.ks=(1.5,)", "is not a whole number"),
        ("train.steps", "has no value"),
        ("train.steps=0", "must be at least 1"),
        ("train.seed=4294967296", "must be below 2**32"),
        ("optimizer.learning_rate=0", "must be above 0"),
        ("optimizer.learning_rate=1e400", "must be above 0 and finite"),
        ("model.dropout=1", "below 1"),
        ("model.heads=3", "the nearest width is 63"),
        ("train.accumulate=5", "not a multiple"),
        ("data.stride=60", "would skip events"),
        ("data.source=table", "needs config.data.path"),
        ("data.source=store", "needs config.data.path, the folder that prepare --output wrote"),
        ("data.event_types=like", "needs config.data.yambda_event=multi_event, not listens"),
        ("data.event_types=liked", "did you mean 'like'?"),
        ("data.drop_undone=true", "needs config.data.yambda_event=multi_event, not listens"),
        ("data.yambda_event=unlike", "did you mean 'unlikes'?"),
        ("evaluation.best_metric=ndgc@10", "did you mean ndcg@10?"),
        ("evaluation.best_metric=ndcg@7", "did you mean ndcg@"),
        ("evaluation.ks=()", "list lengths"),
        ("evaluation.baselines=mostpop", "did you mean 'most_pop'?"),
        ("evaluation.metric_version=v3", "it must be one of 'standard', 'v1', 'v2', 'corrected'"),
        ("evaluation.decay_hours=()", "numbers of hours"),
        ("evaluation.knn_hours=(1,-2)", "numbers of hours, at least 0"),
        ("split.validation_length=0", "leaves no validation events"),
        ("split.test_start=0", "needs config.split.test_start"),
    ],
)
def test_a_wrong_override_gets_one_sentence_that_names_the_field(override, sentence):
    with pytest.raises(ConfigError) as error:
        quickstart(override)
    message = str(error.value)
    assert sentence in message and "\n" not in message
    assert "config." in message or override in message


def test_fields_that_need_times_are_refused_where_there_are_none():
    for fields in ({"split.kind": "temporal"}, {"data.horizon": "10", "split.kind": "leave_last"}):
        config = Config()
        config.data.source, config.data.path, config.split.test_start = "lines", "x", 1
        for name, value in fields.items():
            set_field(config, name, value)
        with pytest.raises(ConfigError, match="needs times"):
            validate(config)


def test_a_missing_config_file_names_the_nearest_one():
    with pytest.raises(ConfigError, match=r"did you mean '.*quickstart\.py'"):
        load_config(str(CONFIGS[0].with_name("quickstrat.py")))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def get_config():\n    return 3", "returned int"),
        ("def get_conf():\n    pass", "AttributeError"),
        ("def get_config(:", "SyntaxError"),
        (
            CONFIG_FILE.format("c.train.steps = 'ten'"),
            "config.train.steps='ten' is not a whole number",
        ),
        (
            CONFIG_FILE.format("c.train.step = 10"),
            "AttributeError",
        ),
    ],
)
def test_a_faulty_config_file_is_named_with_its_fault(tmp_path, text, sentence):
    path = tmp_path / "faulty.py"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(str(path))
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_first_difference_leaves_out_what_it_is_told_to():
    a, b = Config(), Config()
    b.train.steps, b.model.width = 7, 128
    assert first_difference(a, b) == "model.width"
    assert first_difference(a, b, but=("model.",)) == "train.steps"
    assert first_difference(a, b, but=("model.", "train.steps")) is None


def multi_event(*overrides: str) -> Config:
    return load_config(
        str(CONFIGS[0].with_name("yambda50m.py")),
        ["data.min_played_ratio=0", "data.yambda_event=multi_event", *overrides],
    )


@pytest.mark.parametrize("text", ["like,dislike", "('like', 'dislike')", "['like','dislike']", "like, dislike,"])
def test_event_types_are_a_list_of_names(text):
    config = multi_event(f"data.event_types={text}", "data.drop_undone=true")
    assert config.data.event_types == ("like", "dislike")
    assert from_json(to_json(config)) == config


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["data.yambda_event=likes", "data.min_played_ratio=50"], "not likes: other events have no played ratio"),
        (["data.event_types=like", "data.min_played_ratio=50"], "is about listens, which config.data.event_types="),
        (["data.event_types=listen", "data.drop_undone=true"], "is about likes and dislikes, which"),
        (["data.yambda_event=likes", "data.drop_undone=true"], "needs config.data.yambda_event=multi_event, not likes"),
        (["data.source=lines", "data.path=x", "data.organic_only=true"], "needs config.data.source=yambda, not lines"),
    ],
)
def test_a_filter_that_does_not_apply_gets_one_sentence(overrides, sentence):
    with pytest.raises(ConfigError) as error:
        multi_event(*overrides)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_configs_saved_by_earlier_versions_are_read():
    tree = json.loads(to_json(quickstart()))
    tree["evaluation"] |= {"metric_version": "yambda_v1", "decay_hours": 12.0}
    saved = from_json(json.dumps(tree)).evaluation
    assert (saved.metric_version, saved.decay_hours) == ("v1", (12.0,))


def test_hours_to_choose_from_need_validation():
    several = ["evaluation.decay_hours=(1,2)", "evaluation.every=0"]
    quickstart(*several)
    with pytest.raises(
        ConfigError, match=r"decay_hours=\(1.0, 2.0\) is chosen from on validation, but the split leaves"
    ):
        quickstart(*several, "split.validation_length=0")
    quickstart(*several, "split.validation_length=0", "evaluation.baselines=most_pop")
