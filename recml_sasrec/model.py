"""SASRec (Kang & McAuley, arXiv 1808.09781) in Flax NNX, over packed rows.

Rows may hold several histories: attention is causal and stays inside a segment, and positions restart with each, so
that a position's output depends on nothing but its own history.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from recml_sasrec.config import ModelConfig

CACHED_SCORES = 2**20  # of attention at a time: 4 MiB in float32
INIT_STDDEV = 0.02  # of every weight, as in BERT and the SASRec implementations after it


Queries = tuple[jax.Array, jax.Array]  # int32 rows and columns, [Q] each


class Block(nnx.Module):
    """Causal self-attention and an MLP, each with a residual connection and a layer norm before or after it."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        dtype = jnp.dtype(config.dtype)
        width, mlp_width = config.width, config.mlp_width or 4 * config.width

        def linear(features_in: int, features_out: int) -> nnx.Linear:
            init = nnx.initializers.normal(INIT_STDDEV)
            return nnx.Linear(features_in, features_out, kernel_init=init, dtype=dtype, rngs=rngs)

        self.qkv = linear(width, 3 * width)
        self.attention_out = linear(width, width)
        self.mlp_in = linear(width, mlp_width)
        self.mlp_out = linear(mlp_width, width)
        self.attention_norm = nnx.LayerNorm(width, epsilon=config.norm_eps, dtype=dtype, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, epsilon=config.norm_eps, dtype=dtype, rngs=rngs)

    def __call__(
        self, x_BND: jax.Array, mask_B1NN: jax.Array, dropout_key: jax.Array | None, queries: Queries | None = None
    ) -> jax.Array:
        """[B, N, D]; of ``queries`` alone, as [Q, 1, D], where they are given."""
        keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        mix = lambda x: self._attention(x, mask_B1NN, queries)  # noqa: E731
        for norm, sublayer, key in ((self.attention_norm, mix, keys[0]), (self.mlp_norm, self._mlp, keys[1])):
            pre = self.config.norm == "pre"
            change = dropout(sublayer(norm(x_BND) if pre else x_BND), self.config.dropout, key)
            if queries is not None and sublayer is mix:
                x_BND = x_BND[queries][:, None]
            x_BND = x_BND + change if pre else norm(x_BND + change)
        return x_BND

    def _attention(self, x_BND: jax.Array, mask_B1NN: jax.Array, queries: Queries | None) -> jax.Array:
        B, N, D = x_BND.shape
        qkv = self.qkv(x_BND).reshape(B, N, 3, self.config.heads, D // self.config.heads)
        q_BNHd, k_BNHd, v_BNHd = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        if queries is not None:
            rows, columns = queries
            q_BNHd, k_BNHd, v_BNHd = q_BNHd[queries][:, None], k_BNHd[rows], v_BNHd[rows]
            mask_B1NN = mask_B1NN[rows, 0, columns][:, None, None]
        mixed = jax.nn.dot_product_attention(q_BNHd, k_BNHd, v_BNHd, mask=mask_B1NN)
        return self.attention_out(mixed.reshape(*mixed.shape[:2], D))

    def _mlp(self, x_BND: jax.Array) -> jax.Array:
        x_BND = self.mlp_in(x_BND)
        if self.config.activation == "relu":
            return self.mlp_out(jax.nn.relu(x_BND))
        return self.mlp_out(jax.nn.gelu(x_BND, approximate=self.config.activation == "gelu"))


def take_rows(table_VD: jax.Array, items: jax.Array) -> jax.Array:
    """[..., D] rows of a table that is not split."""
    return table_VD[items]


class SASRec(nnx.Module):
    """A batch's histories to hidden states; item scores are ``hidden @ item_vectors(params).T + item_bias``.

    With ``config.content`` an item's vector is its row of the table plus its content, projected. ``item_content`` and
    ``item_warm`` start as zeros and are then filled in from the data, by ``Run.init``.

    Args:
        num_items: V.
        length: N, the most positions a row can have.
        config: width, blocks, heads and variants.
        mean_positives: mean number of targets of a training position; the item bias starts at its prior log-odds.
        rngs: of the initialisation.
        table_rows: rows of the item table, V if 0; those beyond V are no items.
        content_width: C, numbers of an item's content.
    """

    def __init__(
        self,
        num_items: int,
        length: int,
        config: ModelConfig,
        mean_positives: float,
        rngs: nnx.Rngs,
        table_rows: int = 0,
        content_width: int = 0,
    ):
        self.config = config
        init = nnx.initializers.normal(INIT_STDDEV)
        dtype, rows = jnp.dtype(config.dtype), table_rows or num_items
        self.item_table = nnx.Param(init(rngs.params(), (rows, config.width), jnp.float32))
        self.position_table = nnx.Param(init(rngs.params(), (length, config.width), jnp.float32))
        if config.item_bias:
            self.item_bias = nnx.Param(jnp.full((rows,), prior_log_odds(mean_positives, num_items)))
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.blocks)])
        # pre-norm blocks leave their sum unnormalised; post-norm ones expect a normalised input
        self.norm = nnx.LayerNorm(config.width, epsilon=config.norm_eps, dtype=dtype, rngs=rngs)
        if config.content != "none":
            self.item_content = nnx.Param(jnp.zeros((rows, content_width)))
            self.content_projection = nnx.Param(init(rngs.params(), (content_width, config.width), jnp.float32))
            self.item_warm = nnx.Param(jnp.zeros(rows))  # 1: the item has a training event

    def __call__(
        self,
        items_BN: jax.Array,
        positions_BN: jax.Array,
        segment_ids_BN: jax.Array,
        dropout_key: jax.Array | None = None,
        lookup: Callable[[jax.Array, jax.Array], jax.Array] = take_rows,
        queries: Queries | None = None,
        cached: bool = False,
    ) -> jax.Array:
        """Hidden states [B, N, D] in the compute dtype, or [Q, D] of ``queries``; without a key nothing is dropped.

        ``cached`` takes as many rows at a time as leave the attention's scores in a CPU's cache, and drops nothing.
        ``lookup(table, items_BN)`` gives the items' rows of the table [B, N, D] and of the content [B, N, C].
        """
        config = self.config
        keys = [None] * (config.blocks + 1)
        if dropout_key is not None and config.dropout:
            keys = list(jax.random.split(dropout_key, config.blocks + 1))
        x_BND = lookup(self.item_table[...], items_BN) + self.position_table[...][positions_BN]
        if config.content != "none":  # rows first: all items' vectors are the head's alone
            x_BND += lookup(self.item_content[...], items_BN) @ self.content_projection[...]
        x_BND = x_BND.astype(config.dtype)
        if config.norm == "post":
            x_BND = self.norm(x_BND)
        x_BND = dropout(x_BND, config.dropout, keys[-1])
        mask_B1NN = attention_mask(segment_ids_BN)
        for block, key in zip(self.blocks, keys, strict=False):
            if queries is not None and block is self.blocks[-1]:
                x_BND = block(x_BND, mask_B1NN, key, queries)  # nobody reads its other positions
            elif cached:
                one = lambda row, block=block: block(row[0][None], row[1][None], None)[0]  # noqa: E731
                size = max(1, CACHED_SCORES // mask_B1NN[0].size // config.heads)
                x_BND = jax.lax.map(one, (x_BND, mask_B1NN), batch_size=size)
            else:
                x_BND = block(x_BND, mask_B1NN, key)
        x_BND = self.norm(x_BND) if config.norm == "pre" else x_BND
        return x_BND if queries is None else x_BND[:, 0]


def item_vectors(params: dict[str, Any]) -> jax.Array:
    """float32 [rows, D] what hidden states are scored against: the item table, and projected content if there is."""
    if "item_content" not in params:
        return params["item_table"]
    return params["item_table"] + params["item_content"] @ params["content_projection"]


def ranking_bias(params: dict[str, Any]) -> jax.Array | None:
    """float32 [rows] item bias when ranking, None without one: a cold item's is the mean of the warm ones'.

    A bias learns how often an item is met, of which nothing is known for a cold one.
    """
    bias = params.get("item_bias")
    if bias is None or "item_warm" not in params:
        return bias
    warm = params["item_warm"] > 0
    return jnp.where(warm, bias, jnp.sum(bias, where=warm) / jnp.maximum(jnp.sum(warm), 1))


GIVEN = {"none": (), "fixed": ("item_content", "item_warm"), "trainable": ("item_warm",)}


def split_given(params: dict[str, Any], content: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what training changes, what it takes as given: it has no gradient and no moments)."""
    given = {name: params[name] for name in GIVEN[content]}
    return {name: leaf for name, leaf in params.items() if name not in given}, given


def attention_mask(segment_ids_BN: jax.Array) -> jax.Array:
    """bool [B, 1, N, N]: a query sees itself and the earlier positions of its segment."""
    same = segment_ids_BN[:, :, None] == segment_ids_BN[:, None, :]
    N = segment_ids_BN.shape[1]
    return (same & jnp.tril(jnp.ones((N, N), bool)))[:, None]


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes a share ``rate`` of the entries and scales the others up; the identity without a key."""
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def prior_log_odds(mean_positives: float, num_items: int) -> float:
    """log(p / (1 - p)) of p = mean_positives / V, an item's chance to be a target before anything is known."""
    p = min(max(mean_positives / num_items, 1e-12), 0.5)
    return math.log(p / (1 - p))


def abstract(module_init: Any) -> tuple[nnx.GraphDef, Any]:
    """The graph definition and the shapes of the parameters of what ``module_init()`` would build."""
    graphdef, state = nnx.split(nnx.eval_shape(module_init), nnx.Param)
    return graphdef, nnx.to_pure_dict(state)
