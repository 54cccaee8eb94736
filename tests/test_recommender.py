"""Recommendations by raw ids, against the evaluation's lists and brute force in numpy."""

import json

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recml_sasrec import Recommender, recommend, run_folder, trainer
from recml_sasrec.checkpoint import CheckpointError, Checkpoints
from recml_sasrec.config import ConfigError
from recml_sasrec.data.events import DataError
from recml_sasrec.data.loader import open_data
from recml_sasrec.data.queries import evaluated_users
from recml_sasrec.ranking import evaluation
from recml_sasrec.run import Progress, Run
from tests.tiny import tiny_config

K = 10
WORDS = [f"{name} {n}" for n in range(10) for name in ("Größe,", "東京", "naïve\u2028x", "a")][:39]


@pytest.fixture(scope="module")
def integers(tmp_path_factory):
    """A run on generated events with integer ids, positions counted from the newest, and its recommender."""
    folder = tmp_path_factory.mktemp("integers")
    config = tiny_config(folder / "cache")
    config.train.steps, config.evaluation.every = 10, 0
    config.data.position_order = "newest_first"
    trainer.train(config, folder / "run")
    return folder / "run", Recommender.load(folder / "run")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """An untrained run whose events are gone: ids of text, users of 64 bits, the table split over two devices."""
    folder = tmp_path_factory.mktemp("texts")
    rng, log = np.random.default_rng(0), folder / "log.csv"
    (folder / "run").mkdir()
    rows = [f'{2**62 + user},"{WORDS[rng.integers(39)]}"' for user in range(30) for _ in range(12)]
    log.write_text("user,item\n" + "\n".join(rows), encoding="utf-8")
    config = tiny_config(folder / "cache")
    config.data.source, config.data.path = "table", str(log)
    config.data.user_column, config.data.item_column, config.data.time_column = "user", "item", ""
    config.split.kind, config.train.batch_size = "leave_last", 3  # odd: rows can't be split, so items are
    run = Run(config, open_data(config))
    run_folder.adopt(folder / "run", config, run.data.store)
    with Checkpoints(folder / "run", 1, "ndcg@10") as checkpoints:
        checkpoints.save(0, run.init(), run.info(Progress()))
    for path in (log, *(folder / "cache").rglob("*.npy")):
        path.unlink()
    return folder / "run", Recommender.load(folder / "run", "latest")


def scores_of(recommender, history):
    """float64 [V] scores after a history of raw ids: pre-norm SASRec of one block, in numpy alone."""
    rank = {raw: row for row, raw in enumerate(recommender.item_ids.to_pylist())}
    rows = [rank[raw] for raw in history][-16:]
    place = np.arange(len(rows))
    place = place[::-1] if recommender.config.data.position_order == "newest_first" else place
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), recommender._params)
    block, table = params["blocks"][0], params["item_table"][: len(rank)]

    def norm(x, p):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]

    def linear(x, p):
        return x @ p["kernel"] + p["bias"]

    def attend(q, k, v):
        weights = np.exp(q @ k.T / np.sqrt(q.shape[1])) * np.tri(len(q))
        return weights / weights.sum(1, keepdims=True) @ v

    x = table[rows] + params["position_table"][place]
    qkv = np.split(linear(norm(x, block["attention_norm"]), block["qkv"]), 6, axis=1)  # 2 heads of q, k, v
    heads = [attend(*qkv[head::2]) for head in (0, 1)]
    x = x + linear(np.concatenate(heads, 1), block["attention_out"])
    y = linear(norm(x, block["mlp_norm"]), block["mlp_in"])
    y = y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    x = x + linear(y, block["mlp_out"])
    return norm(x, params["norm"])[-1] @ table.T + params["item_bias"][: len(rank)]


def brute(recommender, history, k, allowed):
    """The k best allowed raw ids with their scores; ties to the smaller id, as numbers or code points."""
    raw = recommender.item_ids.to_pylist()
    pairs = [
        (-score, item) for item, score in zip(raw, scores_of(recommender, history), strict=True) if item in allowed
    ]
    return [(item, -score) for score, item in sorted(pairs)[:k]]


def same(got, expected):
    assert [item for item, _ in got] == [item for item, _ in expected]
    np.testing.assert_allclose([s for _, s in got], [s for _, s in expected], rtol=1e-5, atol=1e-5)


def test_recommendations_are_the_lists_that_evaluation_ranks(integers, monkeypatch):
    workdir, recommender = integers
    config, _ = run_folder.read(workdir)
    data = open_data(config)
    run, ranked = Run(config, data), {}
    monkeypatch.setattr(
        evaluation,
        "_score",
        lambda metrics, data, which, users, ids: ranked.update(zip(users, np.asarray(ids), strict=True)),
    )
    with Checkpoints(workdir, 2, "ndcg@10") as checkpoints:
        params = checkpoints.restore_params(checkpoints.best, run.abstract_state.params)
    monkeypatch.setattr(evaluation.RankingMetrics, "result", lambda self: {})
    run.evaluate(params, "test", type("Never", (), {"poll": lambda *_, **__: False})())
    ranked.pop(-1, None)
    users = evaluated_users(data.split, "test")
    raw = data.store.item_ids.to_pylist()
    events = [range(data.split.train_start[u], data.split.test_history_end[u]) for u in users]
    histories = [[raw[data.store.items[e]] for e in own] for own in events]
    assert len(users) > 8 and max(map(len, histories)) > config.data.length  # both sizes of batch, and a cut history
    lists = recommender.recommend(histories, k=K)
    assert [[item for item, _ in got] for got in lists] == [[raw[i] for i in ranked[u]] for u in users]
    alone = recommender.recommend(histories[:1], k=K)
    same(alone[0], lists[0])


def test_allow_block_seen_and_long_lists_agree_with_brute_force(integers):
    _, recommender = integers
    raw = recommender.item_ids.to_pylist()
    rng = np.random.default_rng(1)
    histories = [[raw[i] for i in rng.integers(len(raw), size=n)] for n in (1, 5, 16, 40)]
    some, others = raw[::3], [set(raw[u : 60 + u]) for u in range(4)]
    seen, every = [set(history) for history in histories], [set(raw)] * 4
    cases = [
        ({}, every),
        ({"filter_seen": True}, [set(raw) - s for s in seen]),
        ({"allow": some}, [set(some)] * 4),
        ({"block": set(some)}, [set(raw) - set(some)] * 4),
        ({"allow": others, "filter_seen": True}, [o - s for o, s in zip(others, seen, strict=True)]),
        ({"block": others, "filter_seen": True}, [set(raw) - o - s for o, s in zip(others, seen, strict=True)]),
        ({"allow": others, "block": some}, [o - set(some) for o in others]),
        ({"allow": np.array(some), "block": others}, [set(some) - o for o in others]),
        ({"allow": []}, [set()] * 4),
        ({"allow": [some, None, others[2], []]}, [set(some), set(raw), others[2], set()]),
        ({"block": [None, some, None, some]}, [set(raw), set(raw) - set(some)] * 2),
        ({"allow": [None] * 4, "block": [None] * 4}, every),
    ]
    for options, allowed in cases:
        lists = recommender.recommend(histories, k=1000, **options)  # all that is allowed
        for got, history, items in zip(lists, histories, allowed, strict=True):
            same(got, brute(recommender, history, 1000, items))
    assert recommender.recommend(histories, k=K) == [got[:K] for got in recommender.recommend(histories, k=1000)]


def test_ties_go_to_the_smaller_id_in_the_catalogue_and_in_a_list(integers):
    workdir, _ = integers
    recommender = Recommender.load(workdir)
    raw = recommender.item_ids.to_pylist()
    recommender._table = recommender._table.at[:].set(recommender._table[3])
    recommender._bias = recommender._bias * 0
    assert [item for item, _ in recommender.recommend([raw[:4]], k=5)[0]] == raw[:5]
    assert [item for item, _ in recommender.recommend([raw[:4]], k=2, allow=[raw[:1:-1]])[0]] == raw[2:4]
    assert [item for item, _ in recommender.similar_items(raw[1], k=2)] == [raw[0], raw[2]]


def test_unknown_ids_are_skipped_and_counted_and_ids_may_be_of_numpy_or_digits(integers, caplog):
    _, recommender = integers
    raw = recommender.item_ids.to_pylist()
    lists = recommender.recommend([[raw[0], 10**15, raw[1]], [], ["x", 2**70, "007", -5], raw[:2]], k=3)
    assert recommender.unknown.tolist() == [1, 0, 4, 0] and recommender.without_history == 2
    assert "skipped 5 unknown ids in 2 of 4 histories; 2 have no known item" in caplog.text
    assert lists[0] == lists[3] and lists[1] == lists[2] == [] and len(lists[0]) == 3
    other = recommender.recommend([np.array(raw[:2], np.uint32), map(str, raw[:2]), [np.int16(raw[0]), raw[1]]], k=3)
    assert other == [lists[0]] * 3 and all(type(item) is int and type(s) is float for item, s in lists[0])
    assert recommender.recommend([]) == []


@pytest.mark.parametrize(
    ("histories", "options", "sentence"),
    [
        ([1, 2], {}, "put single ids into a list"),
        ("12", {}, "histories must be a list"),
        ([[1.5]], {}, "1.5 is a float but the run's ids are integers"),
        ([[True]], {}, "True is a bool"),
        ([[None]], {}, "None is a NoneType"),
        ([["\ud800"]], {}, "is not valid Unicode"),
        ([[1]], {"k": 0}, "k is 0 but must be a whole number of at least 1"),
        ([[1]], {"k": 2.5}, "k is 2.5"),
        ([[1], [2]], {"allow": [[1]]}, "allow has 1 lists for 2 histories"),
        ([[1]], {"block": 7}, "block must be a list"),
        ([np.array(1)], {}, "a history must be a list"),
    ],
)
def test_what_is_no_history_gets_a_sentence(integers, histories, options, sentence):
    with pytest.raises((DataError, ConfigError), match=sentence):
        integers[1].recommend(histories, **options)


def test_similar_items_are_the_nearest_rows_by_cosine(integers):
    _, recommender = integers
    raw = recommender.item_ids.to_pylist()
    table = np.asarray(recommender._params["item_table"])[: len(raw)].astype(np.float64)
    cosines = table @ table[7] / np.linalg.norm(table, axis=1) / np.linalg.norm(table[7])
    nearest = [i for i in np.argsort(-cosines) if i != 7]
    same(recommender.similar_items(raw[7], k=500), [(raw[i], cosines[i]) for i in nearest])
    with pytest.raises(DataError, match="item 'x' is none of the"):
        recommender.similar_items("x")


def test_ids_of_text_need_nothing_but_the_folder(texts):
    _, recommender = texts
    assert recommender.item_ids.to_pylist() == sorted(recommender.item_ids.to_pylist())
    history = [WORDS[4], "nowhere", WORDS[1], WORDS[2]]
    got = recommender.recommend([history], k=5, block=[WORDS[0]])[0]
    same(got, brute(recommender, [WORDS[4], *WORDS[1:3]], 5, set(WORDS[1:])))
    assert recommender.unknown.tolist() == [1]
    got = recommender.recommend([history], k=5, allow=[WORDS[5:30]])[0]
    same(got, brute(recommender, [WORDS[4], *WORDS[1:3]], 5, set(WORDS[5:30])))
    assert len(recommender.similar_items(WORDS[0], k=100)) == 38
    assert recommender._params["item_table"].shape[0] == 40  # a row that is no item
    with pytest.raises(DataError, match="5 is a int but the run's ids are text; give text, as '5'"):
        recommender.recommend([[5]])
    with pytest.raises(DataError, match="not valid Unicode"):
        recommender.recommend([["\ud800"]])


def test_few_ids_are_found_in_many_as_many_are(texts):
    """Text is looked up in two ways."""
    _, recommender = texts
    many = Recommender.__new__(Recommender)
    many.item_ids = pa.array(sorted(f"{word}{n}" for word in WORDS for n in range(100)), pa.large_string())
    asked = [many.item_ids[i].as_py() for i in (0, 17, 3899)] + ["", "\U0010ffff", WORDS[0]]
    assert many._find(asked).tolist() == [0, 17, 3899, -1, -1, -1]
    assert recommender._find(WORDS).tolist() == [recommender.item_ids.to_pylist().index(word) for word in WORDS]


def test_a_folder_without_ids_or_checkpoints_is_refused(integers, tmp_path):
    workdir, _ = integers
    with pytest.raises(ConfigError, match="holds no run"):
        Recommender.load(tmp_path)
    (tmp_path / "config.json").write_text((workdir / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"item_ids.arrow, the raw ids of the run's items, is missing or damaged"):
        Recommender.load(tmp_path)
    ids = pa.table({"id": pa.array([1, 2])})
    with pa.OSFile(str(tmp_path / "item_ids.arrow"), "wb") as file, pa.ipc.new_file(file, ids.schema) as writer:
        writer.write_table(ids)
    with pytest.raises(ConfigError, match="holds other item ids"):
        Recommender.load(tmp_path)
    (tmp_path / "item_ids.arrow").write_bytes((workdir / "item_ids.arrow").read_bytes())
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        Recommender.load(tmp_path)
    assert not (tmp_path / "checkpoints").exists()
    with pytest.raises(CheckpointError, match="has no checkpoint '3'"):
        Recommender.load(workdir, "3")


def test_loading_leaves_a_save_in_progress_alone(integers):
    workdir, _ = integers
    saving = workdir / "checkpoints" / "11.orbax-checkpoint-tmp"
    saving.mkdir()
    Recommender.load(workdir)
    assert saving.exists()
    saving.rmdir()


def command(capsys, *words):
    code = recommend.main([str(word) for word in words])
    return code, *capsys.readouterr()


def test_a_history_on_the_command_line_prints_one_json_object(texts, capsys):
    workdir, recommender = texts
    history = [WORDS[4], "nowhere", WORDS[1]]
    code, out, _ = command(
        capsys, "--workdir", workdir, "--history", json.dumps(history), "--k", 3, "--checkpoint=latest"
    )
    assert code == 0
    expected = [{"item": item, "score": score} for item, score in recommender.recommend([history], k=3)[0]]
    assert json.loads(out) == {"history": history, "unknown": 1, "items": expected}


def test_files_in_and_out_hold_the_same_lists(integers, tmp_path, capsys):
    workdir, recommender = integers
    raw = recommender.item_ids.to_pylist()
    users, histories = [2**62, 7, 8], [raw[:5], [], [raw[3], 10**12]]
    table = pa.table({"history": pa.array(histories, pa.large_list(pa.int64())), "user": users, "more": [0, 0, 0]})
    pq.write_table(table, tmp_path / "in.parquet")
    lines = [json.dumps({"user": user, "history": history}) for user, history in zip(users, histories, strict=True)]
    (tmp_path / "in.jsonl").write_text("\n\n".join(lines))
    (tmp_path / "block.txt").write_text(f"{raw[0]}\r\n\n{raw[1]}\n")
    flags = ("--workdir", workdir, "--k", 4, "--filter-seen", "--block", tmp_path / "block.txt")
    lists = recommender.recommend(histories, k=4, filter_seen=True, block=raw[:2])
    for kind_in, kind_out in (("parquet", "jsonl"), ("jsonl", "parquet")):
        output = tmp_path / f"out.{kind_out}"
        code, out, err = command(capsys, *flags, "--input", tmp_path / f"in.{kind_in}", "--output", output)
        assert code == 0 and out == "", err
    saved = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["user"] for line in saved] == users and [line["unknown"] for line in saved] == [0, 0, 1]
    assert [[(pair["item"], pair["score"]) for pair in line["items"]] for line in saved] == lists
    saved = pq.read_table(tmp_path / "out.parquet").to_pydict()
    assert saved["user"] == users and saved["unknown"] == [0, 0, 1]
    assert [list(zip(*pair, strict=True)) for pair in zip(saved["items"], saved["scores"], strict=True)] == lists
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_file_s_own_lists_hold_for_their_user_beside_those_for_all(integers, tmp_path, capsys, caplog, kind):
    workdir, recommender = integers
    raw = recommender.item_ids.to_pylist()
    rng = np.random.default_rng(2)
    rows = [
        {"user": user, "history": [raw[i] for i in rng.integers(len(raw), size=3)], "allow": allow, "block": block}
        for user, (allow, block) in enumerate(
            [(None, None), (raw[10:40], None), (None, raw[::2]), (raw[:30], [*raw[::3], 10**12]), ([], None)]
        )
    ]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    else:
        lines = [{name: value for name, value in row.items() if value is not None} for row in rows]
        (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name, ids in (("allow", raw[5:]), ("block", raw[20:25])):
        (tmp_path / name).write_text("\n".join(map(str, ids)))
    code, out, _ = command(
        capsys, "--workdir", workdir, "--input", tmp_path / f"in.{kind}", "--k", 200,
        "--allow", tmp_path / "allow", "--block", tmp_path / "block",
    )  # fmt: skip
    assert code == 0 and "skipped 0 unknown ids and 1 of the users' allow and block lists" in caplog.text
    for line, row in zip(map(json.loads, out.splitlines()), rows, strict=True):
        allowed = set(raw[5:]) - set(raw[20:25]) - set(row["block"] or [])
        allowed &= set(raw) if row["allow"] is None else set(row["allow"])
        got = [(pair["item"], pair["score"]) for pair in line["items"]]
        same(got, brute(recommender, row["history"], 200, allowed))


def test_users_of_the_store_have_the_histories_of_evaluation_or_all_events(integers, capsys, caplog):
    workdir, recommender = integers
    data = open_data(run_folder.read(workdir)[0])
    store, raw, names = data.store, data.store.item_ids.to_pylist(), data.store.user_ids.to_pylist()
    evaluated = evaluated_users(data.split, "test")
    user = next(u for u in evaluated if data.split.test_history_end[u] < store.offsets[u + 1])
    ends = {"test": data.split.test_history_end[user], f"{names[user]} {names[0]}": store.offsets[user + 1]}
    for words, end in ends.items():
        code, out, _ = command(capsys, "--workdir", workdir, "--users", words)
        lines = {line["user"]: line["items"] for line in map(json.loads, out.splitlines())}
        assert code == 0 and len(lines) == (len(evaluated) if words == "test" else 2)
        history = [raw[item] for item in store.items[store.offsets[user] : end]]
        same([(pair["item"], pair["score"]) for pair in lines[names[user]]], brute(recommender, history, 10, set(raw)))
    code, out, _ = command(capsys, "--workdir", workdir, "--users", f"nobody {names[0]} {10**15}")
    assert code == 0 and [json.loads(line)["user"] for line in out.splitlines()] == [names[0]]
    assert (
        f"skipped 2 of 3 users, 'nobody' first, who are none of the {len(names)} users of the run's data" in caplog.text
    )


@pytest.mark.parametrize(
    ("words", "content", "sentence"),
    [
        ((), "", "one of the arguments --history --input --users is required"),
        (("--history", "[1"), "", "starts with [ but is no JSON list"),
        (("--history", "1", "--k", "0"), "", "k is 0"),
        (("--history", "1", "--output", "OUT"), "", "--history prints its one list"),
        (("--history", "1", "--allow", "none.txt"), "", "none.txt"),
        (("--history", "1", "--config.model.width=3"), "", "config.model.width can't be given here"),
        (("--users", "nobody"), "", "user 'nobody' is none of the"),
        (("--input", "x.csv", "--output", "OUT"), "", "must end in .parquet or .jsonl"),
        (("--input", "none.jsonl", "--output", "OUT"), "", "does not exist"),
        (("--input", "IN", "--output", "IN"), "{}", "is the --input too"),
        (("--input", "IN", "--output", "OUT"), '{"user": 1, "history": [1]}\n{"user": 2}', "line 2 of"),
        (("--input", "IN", "--output", "OUT"), '{"user": [], "history": [1]}', "must be an integer or text"),
        (("--input", "IN", "--output", "OUT"), '{"user": 1, "history": "12"}', "must be a list of item ids"),
        (("--input", "IN", "--output", "OUT"), '{"user": 1, "history": [1]}\n{"user": "a", "history": [1]}', "not all"),
        (("--input", "IN", "--output", "OUT"), b"\xff", "is not UTF-8 text"),
        (("--input", "IN"), '{"user": 1, "history": [1], "allow": 3}', "the allow list in line 1"),
        (
            ("--input", "IN"),
            '{"user": 1, "history": [1], "block": [1.5]}',
            "1.5 is a float but the run's ids are integers",
        ),
    ],
)
def test_a_wrong_request_gets_one_sentence_and_leaves_no_file(integers, tmp_path, capsys, words, content, sentence):
    if content:
        (tmp_path / "in.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    names = {"IN": tmp_path / "in.jsonl", "OUT": tmp_path / "out.parquet"}
    code, out, err = command(capsys, "--workdir", integers[0], *(names.get(word, word) for word in words))
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and sentence in err, err
    assert {path.name for path in tmp_path.iterdir()} <= {"in.jsonl"}
