"""A run that starts from another one's parameters: what is kept, bit for bit, what is new, and what is refused."""

import json
import pathlib
import shutil

import jax
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from orbax.checkpoint import v1 as ocp

from recml_sasrec import Recommender, grow, optim, trainer
from recml_sasrec.checkpoint import CheckpointError
from recml_sasrec.config import Config, ConfigError
from recml_sasrec.data.events import DataError
from recml_sasrec.data.loader import open_data
from recml_sasrec.run import Run
from recml_sasrec.serving import served
from tests.tiny import params_hash, tiny_config

OLD, NEW = range(100, 160), range(104, 172)  # raw ids: 56 in common, 4 vanish, 12 are new: 20 % more


def write_events(path, items, users=60, text=False):
    """Of each user a walk along the items, the next one mostly the neighbour."""
    rng = np.random.default_rng(users)
    walks = (rng.integers(len(items)) + np.cumsum(rng.choice([1, 1, 1, 2, 5], (users, 30)), 1)) % len(items)
    ids = np.asarray(items)[walks].ravel()
    columns = {"user_id": np.repeat(np.arange(users), 30), "item_id": ids, "timestamp": np.tile(np.arange(30), users)}
    columns["item_id"] = pa.array([f"item {i}" for i in ids]) if text else ids
    pq.write_table(pa.table(columns), path)
    return str(path)


def make_config(folder, path, **fields):
    config = tiny_config(folder / "cache")
    config.data.source, config.data.path, config.split.kind = "table", path, "leave_last"
    config.train.steps, config.evaluation.every, config.checkpoint.every = 12, 0, 6
    config.evaluation.baselines = ()
    for name, value in fields.items():
        section, _, leaf = name.partition("_")
        setattr(getattr(config, section), leaf, value)
    return config


@pytest.fixture(scope="module", autouse=True)
def no_evaluation():
    """What the trained models are worth is not asked here, and costs two compilations a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "final_evaluation", lambda *_: {})
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    trainer.train(make_config(folder, write_events(folder / "old.parquet", OLD)), folder / "base")
    write_events(folder / "new.parquet", NEW, users=80)
    return folder


def grown_config(base, **fields):
    fields = {"init_from_run": str(base / "base"), "data_path": str(base / "new.parquet"), **fields}
    return make_config(base, "", **fields)


def start(config, workdir="nowhere"):
    """The run, how it grew, and its state before any step."""
    opened = grow.open_base(config, pathlib.Path(workdir))
    kept = opened.item_ids if config.init.vanished == "keep" else None
    run = Run(config, open_data(config, kept))
    growth = grow.plan(opened, run.data, config)
    return run, growth, jax.device_get(grow.grown_state(run, growth))


def saved(workdir, step=12):
    """(params, opt_state) as plain trees with text keys, read by the checkpoint library alone."""
    loaded = ocp.load_checkpointables(workdir / "checkpoints" / str(step))
    return loaded["params"], loaded["opt_state"]


def by_text(tree):
    """{"blocks/0/...": array}"""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(str(getattr(k, "key", getattr(k, "idx", None))) for k in path): np.asarray(x) for path, x in pairs}


def moments(opt_state, name):
    """{"blocks/0/...": array} of the mu or nu of the only Adam."""
    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    texts = {"/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", None)))) for k in path): leaf
             for path, leaf in leaves}  # fmt: skip
    return {text.partition(f"/{name}/")[2]: np.asarray(x) for text, x in texts.items() if f"/{name}/" in text}


def test_kept_rows_and_backbone_and_all_their_moments_are_the_base_s_bits(base):
    run, growth, state = start(grown_config(base))
    params, opt_state = saved(base / "base")
    old, new = by_text(params), by_text(state.params)
    rows = {raw: row for row, raw in enumerate(OLD)}
    shared = [raw for raw in run.data.store.item_ids.to_pylist() if raw in rows]
    here = [run.data.store.item_ids.to_pylist().index(raw) for raw in shared]
    there = [rows[raw] for raw in shared]
    assert len(shared) == 56 and set(old) == set(new)
    for name in ("mu", "nu"):
        old |= {f"{name} {key}": value for key, value in moments(opt_state, name).items()}
        new |= {f"{name} {key}": value for key, value in moments(state.opt_state, name).items()}
    assert set(old) == set(new) and len(old) == 3 * len(by_text(params))
    for name, value in new.items():
        if "item_" in name:
            np.testing.assert_array_equal(value[here], old[name][there], err_msg=name)
            if " " in name:
                assert not np.delete(value, here, 0).any() and value[here].any()
        else:
            np.testing.assert_array_equal(value, old[name], err_msg=name)
    counts = [int(x) for x in jax.tree.leaves(state.opt_state) if x.dtype == np.int32]
    assert counts == [12, 0] and state.step == 0  # Adam's is kept, the schedule's starts anew
    assert growth.report == {
        "from_run": str(base / "base"),
        "checkpoint": 12,
        "items": {
            "kept": 56,
            "added": {"table": 12},
            "added_without_training_event": 0,
            "vanished": {"dropped": 4},
        },
        "positions": {"copied": 16, "fresh": 0},
        "moments": "kept",
    }
    table, new_ones = new["item_table"], [i for i in range(len(new["item_table"])) if i not in here][:12]
    kept_mean, kept_std = table[here].mean(0), table[here].std(0)
    z = (table[new_ones] - kept_mean) / kept_std
    assert abs(z.mean()) < 4 / np.sqrt(z.size) and 0.7 < z.std() < 1.3
    np.testing.assert_allclose(new["item_bias"][new_ones], new["item_bias"][here].mean(), rtol=1e-5)


def scores(recommender, histories):
    """{raw id: score} of every item, after each history."""
    return [dict(pairs) for pairs in recommender.recommend(histories, k=10**6)]


def test_scores_of_old_items_for_old_histories_are_unchanged_and_new_items_do_not_crowd_the_top(base):
    rng = np.random.default_rng(0)
    common = [raw for raw in OLD if raw in NEW]
    histories = [rng.choice(common, size).tolist() for size in rng.integers(1, 40, 100)]
    run, _, state = start(grown_config(base))
    before = scores(Recommender.load(base / "base"), histories)
    grown = Recommender(served(run.config, run.data.store.item_ids, run.layout, run.graphdef, state.params))
    after = scores(grown, histories)
    for old, new in zip(before, after, strict=True):
        assert len(old) == 60 and len(new) == 68
        np.testing.assert_allclose([new[raw] for raw in common], [old[raw] for raw in common], rtol=1e-6, atol=1e-6)
    top = [raw for new in after for raw in sorted(new, key=new.get)[-10:]]
    assert sum(raw not in OLD for raw in top) <= 1.25 * len(top) * 12 / 68


def test_kept_vanished_items_join_the_catalogue_and_other_lengths_share_positions(base):
    run, growth, state = start(grown_config(base, init_vanished="keep", data_length=20, train_batch_size=2))
    ids = run.data.store.item_ids.to_pylist()
    assert ids == list(range(100, 172))
    items = growth.report["items"]
    assert (items["kept"], items["added"], items["vanished"]) == (60, {"table": 12}, {"kept": 4})
    assert growth.report["positions"] == {"copied": 16, "fresh": 4}
    params, opt_state = saved(base / "base")
    np.testing.assert_array_equal(state.params["item_table"][:60], params["item_table"])
    np.testing.assert_array_equal(state.params["position_table"][:16], params["position_table"])
    fresh = run.init().params["position_table"]
    np.testing.assert_array_equal(state.params["position_table"][16:], fresh[16:])
    nu = moments(state.opt_state, "nu")["position_table"]
    np.testing.assert_array_equal(nu[:16], moments(opt_state, "nu")["position_table"])
    assert not nu[16:].any()
    shorter = start(grown_config(base, data_length=10))
    np.testing.assert_array_equal(shorter[2].params["position_table"], params["position_table"][:10])
    assert shorter[1].report["positions"] == {"copied": 10, "fresh": 0}


def test_the_state_is_the_same_on_any_mesh(base):
    """61 items of 2 shards: the table has a row that is no item."""
    states = []
    for data, items in ((2, 1), (1, 2)):
        config = grown_config(base, data_path=write_events(base / "odd.parquet", range(104, 165)))
        config.mesh.data, config.mesh.items = data, items
        run, _, state = start(config)
        assert run.layout.table_rows == 60 + items
        states.append(by_text(jax.tree.map(lambda x: x[:61] if x.shape[:1] == (62,) else x, state)))
    for name, value in states[0].items():
        np.testing.assert_allclose(value, states[1][name], rtol=1e-6, err_msg=name)


def crashing(batches, at):
    def with_crash(self, start_step):
        for step, batch in enumerate(batches(self, start_step), start=start_step + 1):
            if step == at:
                raise KeyboardInterrupt
            yield batch

    return with_crash


def test_a_grown_run_resumes_without_the_base_trains_only_new_rows_and_grows_again(base, tmp_path, monkeypatch):
    """Crashed before its first checkpoint it starts from the base again, after it it goes on alone; the end is one."""
    config = grown_config(base, init_vanished="keep", optimizer_old_rows_rate=0.0, optimizer_backbone_rate=0.0)
    folder = tmp_path / "base"
    shutil.copytree(base / "base", folder)
    config.init.from_run = str(folder)
    compile_step, compiled = Run.compile_step, []
    monkeypatch.setattr(Run, "compile_step", lambda self: compiled.append(compile_step(self)) or compiled[0])
    trainer.train(config, tmp_path / "straight")
    monkeypatch.setattr(Run, "compile_step", lambda self: compiled[0])  # the same program: compiled once for all
    batches = Run.batches
    for crash in (3, 8):
        monkeypatch.setattr(Run, "batches", crashing(batches, crash))
        with pytest.raises(KeyboardInterrupt):
            trainer.train(config, tmp_path / "run")
    monkeypatch.setattr(Run, "batches", batches)
    folder.rename(tmp_path / "gone")
    trainer.train(config, tmp_path / "run")
    assert params_hash(tmp_path / "run", 12) == params_hash(tmp_path / "straight", 12)
    report = json.loads((tmp_path / "run/grown.json").read_text())
    assert report["items"]["kept"] == 60 and report["checkpoint"] == 12
    params, before = by_text(saved(tmp_path / "run")[0]), by_text(saved(tmp_path / "gone")[0])
    for name, value in params.items():
        if name in ("item_table", "item_bias"):
            np.testing.assert_array_equal(value[:60], before[name])
        else:
            np.testing.assert_array_equal(value, before[name])
    opened = Recommender.load(tmp_path / "run")
    assert {raw for raw, _ in opened.recommend([[104, 171]], k=72)[0]} == set(range(100, 172))
    again = grown_config(base)
    again.init.from_run = str(tmp_path / "run")
    _, growth, state = start(again)
    items = growth.report["items"]
    assert (items["kept"], items["added"], items["vanished"]) == (68, {"table": 0}, {"dropped": 4})
    np.testing.assert_array_equal(state.params["item_table"][:68], params["item_table"][4:])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model_width": 16}, r"config.model.width=16, but .*base was trained with 8; set config.model.width=8"),
        ({"model_blocks": 2}, "config.model.blocks=2, but .* with 1"),
        ({"model_heads": 4}, "config.model.heads=4, but .* with 2"),
        ({"model_mlp_width": 20}, "config.model.mlp_width=20, but .* with 32"),
        ({"model_norm": "post"}, "config.model.norm=post, but .* with pre"),
        ({"model_activation": "relu"}, "config.model.activation=relu, but .* with gelu"),
        ({"model_item_bias": False}, "config.model.item_bias=False, but .* with True"),
        ({"data_position_order": "newest_first"}, "config.data.position_order=newest_first, but .* with oldest_first"),
        ({"init_checkpoint": "7"}, "has no checkpoint '7'; it has 6, 12"),
        ({"init_from_run": "runs/none"}, "config.init.from_run=runs/none holds no run"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_data_are_read(base, tmp_path, fields, sentence):
    config = grown_config(base, **fields)
    config.data.path = "never read"
    with pytest.raises((ConfigError, CheckpointError), match=sentence) as error:
        trainer.train(config, tmp_path / "run")
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_a_base_that_is_the_workdir_or_has_no_checkpoint_or_no_common_item_or_other_ids_is_refused(base, tmp_path):
    config = grown_config(base)
    with pytest.raises(ConfigError, match="is --workdir itself"):
        trainer.train(config, base / "base")
    shutil.copytree(base / "base", tmp_path / "young", ignore=shutil.ignore_patterns("checkpoints"))
    config.init.from_run = str(tmp_path / "young")
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        trainer.train(config, tmp_path / "run")
    assert not (tmp_path / "young/checkpoints").exists()
    config.init.from_run = str(base / "base")
    config.data.path = write_events(tmp_path / "others.parquet", range(500, 540))
    with pytest.raises(ConfigError, match=r"none of the data's 40 items is one of the 60 of config.init.from_run"):
        trainer.train(config, tmp_path / "run")
    config.data.path = write_events(tmp_path / "text.parquet", OLD, text=True)
    for config.init.vanished in ("drop", "keep"):
        with pytest.raises(DataError, match="are integers but those of the data are text, so that no item"):
            trainer.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"optimizer_old_rows_rate": 0.5}, "config.optimizer.old_rows_rate=0.5 is about the items of another run"),
        ({"init_vanished": "keep"}, "config.init.vanished=keep is about the items of another run"),
        ({"init_new_items": "content", "init_from_run": "x"}, "config.init.new_items=content needs .*content_column"),
        ({"optimizer_table_rate": 0.0, "optimizer_backbone_rate": 0.0}, "leave nothing to train"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(tmp_path, fields, sentence):
    with pytest.raises(ConfigError, match=sentence):
        trainer.train(make_config(tmp_path, "never read", **fields), tmp_path / "run")


TABLES = ("adam", "adam_bf16", "adagrad", "adafactor")


@pytest.mark.parametrize("after", TABLES)
@pytest.mark.parametrize("before", TABLES)
def test_moments_of_every_kind_of_table_go_with_their_rows_and_start_anew_with_another_kind(before, after):
    def optimizer(table, **rates):
        config = Config().optimizer
        config.table = table
        for name, value in rates.items():
            setattr(config, name, value)
        return optim.make_optimizer(config, 10)

    def shaped(rows):
        return {"item_table": np.ones((rows, 3), np.float32), "item_bias": np.ones(rows, np.float32),
                "blocks": {0: np.ones((3, 2), np.float32)}}  # fmt: skip

    rng = np.random.default_rng(0)
    old = optimizer(before).init(shaped(5))
    old = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype) if x.ndim else np.int32(7), old)
    source = np.array([4, -1, 0, 2, -1, 1], np.int32)
    fresh = optimizer(after, old_rows_rate=0.5, backbone_rate=0.0).init(shaped(6))
    grown = grow.grown_moments(old, fresh, source, fresh_table=before != after)
    np.testing.assert_array_equal(grown.old_rows["item_table"], source >= 0)
    adams = [x for x in jax.tree.leaves(grown, is_leaf=is_moments) if is_moments(x)]
    olds = [x for x in jax.tree.leaves(old, is_leaf=is_moments) if is_moments(x)]
    of = lambda states, name: next(s for s in states if hasattr(s, "mu") and name in s.mu)  # noqa: E731
    np.testing.assert_array_equal(of(adams, "blocks").mu["blocks"][0], of(olds, "blocks").mu["blocks"][0])
    np.testing.assert_array_equal(
        of(adams, "blocks").nu["item_bias"][source >= 0], of(olds, "blocks").nu["item_bias"][[4, 0, 2, 1]]
    )
    assert of(adams, "blocks").count == 7
    now, then = (table_moments(tree) for tree in (grown, old))
    for key, value in now.items():
        if before != after:
            assert not value.any()
        elif value.shape[:1] == (6,):
            np.testing.assert_array_equal(value[source >= 0], then[key][[4, 0, 2, 1]])
            assert not value[source < 0].any()
        else:
            np.testing.assert_array_equal(value, then[key])


def is_moments(node):
    return isinstance(node, optax.ScaleByAdamState)


def table_moments(state):
    leaves = jax.tree_util.tree_leaves_with_path(state)
    moments = {optim.moment_of(path): np.asarray(x, np.float32) for path, x in leaves}
    return {key: x for key, x in moments.items() if key[1] == ("item_table",) and key[0] != "old_rows"}


@pytest.mark.parametrize("rule", ["category", "content"])
def test_rules_from_a_table_of_items_count_what_they_gave(base, rule, tmp_path):
    """Items 100..169 are described, 170 and 171 are not; a category is new."""
    ids = np.arange(100, 170)
    content = np.random.default_rng(0).normal(size=(70, 4)).astype(np.float32)
    columns = {
        "item_id": ids,
        "kind": [f"kind {i % 3}" if i < 168 else "new kind" for i in ids],
        "vector": list(content),
    }
    pq.write_table(pa.table(columns), tmp_path / "items.parquet")
    column = "kind" if rule == "category" else "vector"
    fields = {"init_new_items": rule, f"data_{rule}_column": column, "data_items_path": str(tmp_path / "items.parquet")}
    run, growth, state = start(grown_config(base, **fields))
    described = {"category": 8, "content": 10}[rule]
    assert growth.report["items"]["added"] == {rule: described, "table": 12 - described}
    ids = run.data.store.item_ids.to_pylist()
    rows = [ids.index(raw) for raw in range(160, 160 + described)]
    params, _ = saved(base / "base")
    if rule == "content":
        use = [i for i in range(70) if ids[0] <= 100 + i < 160 and 100 + i in ids]
        x, y = content[use].astype(np.float64), np.asarray(params["item_table"], np.float64)[use]
        weights = np.linalg.lstsq(np.c_[x, np.ones(len(x))], y, rcond=None)[0]
        expected = np.c_[content[60:70], np.ones(10)] @ weights
        np.testing.assert_allclose(state.params["item_table"][rows], expected, atol=0.05 * y.std())
    else:
        for raw, row in zip(range(160, 168), rows, strict=True):
            group = [i for i in range(60) if 100 + i in ids and (100 + i) % 3 == raw % 3]
            bias = np.asarray(params["item_bias"])[group].mean()
            np.testing.assert_allclose(state.params["item_bias"][row], bias, rtol=1e-5)


def test_a_single_kept_item_with_content_or_a_category_says_nothing_of_new_ones(base, tmp_path):
    ids = [110, 160, 161]
    pq.write_table(
        pa.table({"item_id": ids, "kind": ["a"] * 3, "vector": [[1.0, 2.0]] * 3}), tmp_path / "items.parquet"
    )
    for rule, column in (("category", "kind"), ("content", "vector")):
        fields = {"init_new_items": rule, f"data_{rule}_column": column}
        config = grown_config(base, **fields, data_items_path=str(tmp_path / "items.parquet"))
        growth = grow.plan(grow.open_base(config, pathlib.Path("nowhere")), open_data(config), config)
        assert growth.report["items"]["added"] == {rule: 0, "table": 12}
