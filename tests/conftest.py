import os

# CPU: an accelerator that is present would change rounding
os.environ["JAX_PLATFORMS"] = "cpu"
# most of the suite's time is compilation of code that runs once
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import pytest

# two devices, so that sharding is tested everywhere
jax.config.update("jax_num_cpu_devices", 2)


@pytest.fixture(scope="session")
def shop(tmp_path_factory):
    """The folder that prepare --output wrote for a small log."""
    from recml_sasrec.data.importing import Asked, import_log

    folder = tmp_path_factory.mktemp("shop")
    rows = [f"{user},{(user * 7 + t * t) % 30}\n" for user in range(40) for t in range(12)]
    (folder / "log.csv").write_text("user,item\n" + "".join(rows))
    import_log(str(folder / "log.csv"), str(folder / "store"), Asked(time="none"))
    return folder / "store"
