"""Exported folders: the same lists as the run's, without this package, and whole or not at all."""

import hashlib
import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from recml_sasrec import Recommender, evaluate, export, model_hub, serving
from recml_sasrec.checkpoint import CheckpointError
from recml_sasrec.config import ConfigError
from recml_sasrec.data.events import DataError
from recml_sasrec.data.vocabulary import fingerprint
from tests.test_recommender import WORDS, brute, same
from tests.tiny import log_of, untrained_run

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def integers(tmp_path_factory):
    """(run, its exported folder): 64-bit integer ids, positions from the newest, no bias, bfloat16."""
    folder, rng = tmp_path_factory.mktemp("integers"), np.random.default_rng(0)
    config = log_of(folder, [[2**62 + 7 * int(i) for i in rng.integers(60, size=12)] for _ in range(30)])
    config.data.position_order, config.model.item_bias, config.model.dtype = "newest_first", False, "bfloat16"
    workdir = untrained_run(folder, config)
    export.export_run(workdir, folder / "model")
    return workdir, folder / "model"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """(run, its exported folder): ids of text with blanks and Unicode, positions from the oldest."""
    folder, rng = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)
    config = log_of(folder, [[WORDS[i] for i in rng.integers(39, size=12)] for _ in range(30)])
    workdir = untrained_run(folder, config)
    export.export_run(workdir, folder / "model", "latest")
    return workdir, folder / "model"


def test_an_exported_folder_gives_the_lists_of_its_run(integers, texts):
    run, exported = map(Recommender.load, integers)
    raw = run.item_ids.to_pylist()
    assert exported.item_ids == run.item_ids
    rng = np.random.default_rng(1)
    histories = [[raw[i] for i in rng.integers(len(raw), size=n)] for n in (1, 5, 16, 40)] + [[]]
    for options in ({}, {"filter_seen": True}, {"allow": [raw[n:] for n in range(5)], "block": raw[::3]}):
        for a, b in zip(exported.recommend(histories, **options), run.recommend(histories, **options), strict=True):
            same(a, b)
    same(exported.similar_items(raw[3]), run.similar_items(raw[3]))
    run, exported = Recommender.load(texts[0]), Recommender.load(texts[1], "3")
    same(exported.recommend([WORDS[:20]], k=39)[0], brute(run, WORDS[:20], 39, set(WORDS)))
    with pytest.raises(DataError, match="5 is a int but the run's ids are text"):
        exported.recommend([[5]])


def test_the_example_gives_the_same_list_with_four_packages_alone(integers, texts):
    blocked = ("recml_sasrec", "flax", "optax", "orbax", "flatbuffers", "huggingface_hub", "grain")
    code = f"""
import runpy, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
assert not set({blocked}) & {{name.partition(".")[0] for name in sys.modules}}
"""
    for workdir, folder in (integers, texts):
        recommender = Recommender.load(workdir)
        raw = recommender.item_ids.to_pylist()
        assert len((folder / "example.py").read_text().splitlines()) <= 30
        for history in (raw[:3], [*raw[5:30], 10**15 if workdir == integers[0] else "nowhere"]):
            done = subprocess.run(
                [sys.executable, "-c", code, str(folder / "example.py"), *map(str, history)],
                cwd=folder, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True, encoding="utf-8",
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            pairs = [line.rsplit("\t", 1) for line in done.stdout.rstrip("\n").split("\n")]
            same([(type(raw[0])(item), float(score)) for item, score in pairs], recommender.recommend([history])[0])


def test_the_folder_holds_what_its_card_says(texts, tmp_path):
    workdir, folder = texts
    assert {path.name for path in folder.iterdir()} == {
        "README.md", "config.json", "encoder.stablehlo", "example.py", "items.parquet", "model.safetensors"
    }  # fmt: skip
    run = Recommender.load(workdir)
    assert pq.read_table(folder / "items.parquet")["id"].to_pylist() == run.item_ids.to_pylist()
    tensors = load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(tensors["item_vectors"], np.asarray(run._params["item_table"])[:39])
    np.testing.assert_array_equal(tensors["item_bias"], np.asarray(run._params["item_bias"])[:39])
    assert str(workdir.parent) not in "".join((folder / name).read_text() for name in ("config.json", "README.md"))
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: recml_sasrec\n") and "| items, V | 39 (raw ids are text) |" in card
    assert "Not evaluated at this checkpoint." in card
    shutil.copytree(workdir, tmp_path / "run")
    report = {"protocol": {"seen items": "kept", "checkpoint": "step 3"}, "rows": {"sasrec": {"ndcg@10": 0.125}}}
    (tmp_path / "run/evaluation.json").write_text(json.dumps(report))
    export.export_run(tmp_path / "run", tmp_path / "model")
    card = (tmp_path / "model/README.md").read_text()
    assert "seen items  kept\n" in card and "ndcg@10  0.125000" in card and "Not evaluated" not in card


def edit(folder, **values):
    about = json.loads((folder / "config.json").read_text()) | values
    if "sha256" in about:
        about["sha256"] = serving.about_sha256(about)
    (folder / "config.json").write_text(json.dumps(about))


def newer_stablehlo(folder):
    path = folder / "encoder.stablehlo"
    path.write_bytes(path.read_bytes().replace(b"StableHLO_v1.", b"StableHLO_v9.", 1))
    edit(folder, encoder_sha256=hashlib.sha256(path.read_bytes()).hexdigest(), jax="99.0")


def unreadable_stablehlo(folder):
    truncate(folder, "encoder.stablehlo")
    digest = hashlib.sha256((folder / "encoder.stablehlo").read_bytes()).hexdigest()
    edit(folder, encoder_sha256=digest, jax="99.0")


def other_items(folder, count):
    pq.write_table(pa.table({"id": [f"other {n}" for n in range(count)]}), folder / "items.parquet")


def other_tensors(folder):
    """As those of another step: the same names and shapes."""
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"item_bias": tensors["item_bias"] + 1}, folder / "model.safetensors")


def edited_by_hand(folder, **values):
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | values))


def truncate(folder, name):
    os.truncate(folder / name, (folder / name).stat().st_size // 2)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda f: truncate(f, "model.safetensors"), "model.safetensors, the model's arrays, is missing, damaged"),
        (lambda f: truncate(f, "encoder.stablehlo"), "encoder.stablehlo, the model's encoder, is missing or damaged"),
        (lambda f: truncate(f, "items.parquet"), "items.parquet, the raw ids of the model's items, is missing or dam"),
        (lambda f: truncate(f, "config.json"), "config.json of the exported model is missing, damaged"),
        (lambda f: (f / "encoder.stablehlo").unlink(), "the model's encoder, is missing or damaged"),
        (lambda f: (f / "model.safetensors").unlink(), "the model's arrays, is missing, damaged"),
        (
            lambda f: (f / "model.safetensors").write_bytes(pickle.dumps({})),
            "the model's arrays, is missing, damaged",
        ),
        (lambda f: other_items(f, 38), "has 38 items but the model 39"),
        (lambda f: other_items(f, 39), "holds other item ids than the model was trained on"),
        (other_tensors, "the model's arrays, is missing, damaged or of another export"),
        (lambda f: edited_by_hand(f, tensors=[1]), "config.json of the exported model is missing, damaged or edited"),
        (lambda f: edited_by_hand(f, length=5), "config.json of the exported model is missing, damaged or edited"),
        (lambda f: edited_by_hand(f, format="1"), "config.json of the exported model is missing, damaged or edited"),
        (lambda f: (f / "config.json").write_text("[" * 9999), "config.json of the exported model is missing, damag"),
        (lambda f: edit(f, format=2), "has format 2 of exported models but this version reads up to 1; upgrade"),
        (lambda f: edit(f, calling_convention=99, jax="99.0"), "install jax 99.0 or later, or export the run with"),
        (lambda f: edit(f, calling_convention=1, jax="0.4"), "no longer reads; export again"),
        (newer_stablehlo, "was exported with jax 99.0, whose StableHLO jax .* can't read; install jax 99.0 or later"),
        (
            unreadable_stablehlo,
            "was exported with jax 99.0, whose StableHLO jax .* can't read; install jax 99.0 or later",
        ),
    ],
)
def test_a_damaged_folder_gets_one_sentence(texts, tmp_path, damage, sentence):
    shutil.copytree(texts[1], tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(ConfigError, match=sentence) as raised:
        Recommender.load(tmp_path / "model")
    assert "\n" not in str(raised.value)


def test_a_folder_that_is_no_run_or_another_checkpoint_is_refused(texts, tmp_path, capsys):
    folder = texts[1]
    with pytest.raises(ConfigError, match="holds no run"):
        Recommender.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"was exported from checkpoint latest \(step 3\) and holds no other"):
        Recommender.load(folder, "7")
    assert evaluate.main(["--workdir", str(folder)]) == 2
    assert "is an exported model, not a run" in capsys.readouterr().err


def test_a_checkpoint_of_other_items_is_refused(texts, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(texts[0], run)
    ids = pa.table({"id": pa.array([f"other {n:02}" for n in range(39)], pa.large_string())})
    with pa.OSFile(str(run / "item_ids.arrow"), "wb") as file, pa.ipc.new_file(file, ids.schema) as writer:
        writer.write_table(ids)
    edit(run, vocabulary=fingerprint(ids["id"].combine_chunks()))
    with pytest.raises(ConfigError, match=r"checkpoint of step 3 in .* doesn't say that it is of the items of"):
        export.export_run(run, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_wrong_request_gets_one_sentence_and_leaves_no_folder(texts, tmp_path, capsys):
    workdir, model = texts
    shutil.copytree(workdir, tmp_path / "bare", ignore=lambda *_: ["checkpoints"])
    shutil.copytree(workdir, tmp_path / "nameless", ignore=lambda *_: ["item_ids.arrow"])
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    new = tmp_path / "new"
    cases = {
        ("--workdir", workdir): "--output is missing",
        ("--workdir", tmp_path / "bare", "--output", new): "has no checkpoint yet",
        (
            "--workdir",
            tmp_path / "nameless",
            "--output",
            new,
        ): "item_ids.arrow, the raw ids of the run's items, is miss",
        ("--workdir", tmp_path / "none", "--output", new): "holds no run",
        ("--workdir", workdir, "--output", new, "--checkpoint", "7"): "has no checkpoint '7'; it has 3",
        ("--workdir", workdir, "--output", tmp_path / "model"): "exists; name another folder, or replace it with --rep",
        ("--workdir", workdir, "--output", tmp_path / "bare", "--replace"): "exists and is no exported model",
        ("--workdir", workdir, "--output", tmp_path / "file", "--replace"): "exists and is no exported model",
        ("--workdir", workdir, "--output", tmp_path / "a/b"): "the folder of --output",
        ("--workdir", workdir, "--output", new, "--push", "shop"): "--push shop is no name of a repository",
        ("--workdir", workdir, "--output", new, "--config.model.width=4"): "config.model.width can't change after",
        ("--workdir", tmp_path / "model", "--output", new): "is exported already; push it",
    }
    for words, sentence in cases.items():
        code = export.main([str(word) for word in words])
        err = capsys.readouterr().err
        assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and sentence in err, err
        assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "model/README.md").write_text("old")
    assert export.main(["--workdir", str(workdir), "--output", str(tmp_path / "model"), "--replace"]) == 0
    assert (tmp_path / "model/README.md").read_text().startswith("---")
    assert sorted(tmp_path.rglob("*")) == before


def test_replace_takes_nothing_away_that_no_export_wrote(texts, tmp_path, capsys):
    workdir, model = texts
    (tmp_path / "other").mkdir()
    for name, text in {"config.json": "{}", "model.safetensors": "weights", "items.parquet": "x"}.items():
        (tmp_path / "other" / name).write_text(text)
    shutil.copytree(model, tmp_path / "mine")
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name, sentence in (
        ("other", "is no exported model"),
        ("mine", "holds 'thesis.txt' too, which no export wrote"),
    ):
        assert export.main(["--workdir", str(workdir), "--output", str(tmp_path / name), "--replace"]) == 2
        assert sentence in capsys.readouterr().err
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_link_keeps_leading_to_the_export(texts, tmp_path):
    shutil.copytree(texts[1], tmp_path / "model")
    (tmp_path / "model/README.md").write_text("old")
    (tmp_path / "link").symlink_to("model")
    (tmp_path / "dangling").symlink_to("new")
    assert export.main(["--workdir", str(texts[0]), "--output", str(tmp_path / "link"), "--replace"]) == 0
    assert export.main(["--workdir", str(texts[0]), "--output", str(tmp_path / "dangling")]) == 0
    for link, folder in (("link", "model"), ("dangling", "new")):
        assert (tmp_path / link).readlink() == pathlib.Path(folder)
        assert (tmp_path / folder / "README.md").read_text().startswith("---")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "link", "model", "new"]


def test_a_kill_while_an_export_is_replaced_loses_neither(texts, tmp_path, monkeypatch):
    """The second rename is that after the former export has given its name up."""
    model = tmp_path / "model"
    shutil.copytree(texts[1], model)

    def killed(source, target):
        if not model.exists():
            raise KeyboardInterrupt
        return rename(source, target)

    rename = os.rename
    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        export.export_run(texts[0], model, replace=True)
    monkeypatch.undo()
    assert not model.exists()
    assert Recommender.load(model).item_ids.equals(Recommender.load(texts[1]).item_ids)
    export.export_run(texts[0], model, replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_incomplete_export_is_not_pushed(texts, tmp_path, capsys, monkeypatch):
    shutil.copytree(texts[1], tmp_path / "model")
    truncate(tmp_path / "model", "model.safetensors")
    monkeypatch.setattr(model_hub, "push", lambda *_: pytest.fail("it went to the network"))
    assert export.main(["--workdir", str(tmp_path / "model"), "--push", "me/shop"]) == 2
    assert "the model's arrays, is missing, damaged" in capsys.readouterr().err


def test_no_file_is_unpickled_on_the_way_from_training_to_an_exported_model(tmp_path):
    """Python tells its auditors of every class or function that any unpickler looks up.

    TensorBoard's writer sends its events, and a marker for the end, through a queue to its own thread.
    """
    code = """
import collections, pickle, sys
found = []
sys.addaudithook(lambda event, args: found.append(args) if event == "pickle.find_class" else None)
pickle.loads(pickle.dumps(collections.OrderedDict()))
assert found == [("collections", "OrderedDict")]
from recml_sasrec import Recommender, evaluate, export, recommend, trainer
from tests.tiny import tiny_config
folder = sys.argv[1]
for steps in (2, 3):  # and resume
    config = tiny_config(folder + "/cache")
    config.train.steps, config.evaluation.every = steps, 0
    trainer.train(config, folder + "/run")
assert evaluate.main(["--workdir", folder + "/run"]) == 0
assert export.main(["--workdir", folder + "/run", "--output", folder + "/model"]) == 0
item = str(Recommender.load(folder + "/run").item_ids[0])
for path in ("/run", "/model"):
    assert recommend.main(["--workdir", folder + path, "--history", item]) == 0
del found[0]
assert set(found) <= {("tensorboardX.proto.event_pb2", "Event"), ("builtins", "object")}, found
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = [
        line for path in ROOT.glob("recml_sasrec/**/*.py") for line in path.read_text().splitlines() if "pickle" in line
    ]
    assert all("allow_pickle=False" in line or "never pickle" in line for line in words), words
