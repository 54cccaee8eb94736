"""Multi-label SASRec training over very large catalogues, in JAX.

Shape letters used throughout the package (``h_TD`` is an array of shape [T, D]):

    B  rows of a batch            N  positions of a row         T  tokens (positions, flattened)
    V  items of the catalogue     D  width of the model         L  target slots of a position
    H  attention heads            Q  queries (users to rank)    K  length of a ranked list
    S  excluded items of a query  U  users
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recml_sasrec.recommender import Recommender

__all__ = ["Recommender"]


def __getattr__(name: str) -> object:
    if name == "Recommender":  # on first use: a mistyped flag is answered before JAX is loaded
        from recml_sasrec.recommender import Recommender

        return Recommender
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
