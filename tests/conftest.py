import os

# CPU: an accelerator that is present would change rounding
os.environ["JAX_PLATFORMS"] = "cpu"
# most of the suite's time is compilation of code that runs once
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax

# two devices, so that sharding is tested everywhere
jax.config.update("jax_num_cpu_devices", 2)
