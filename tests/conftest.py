import os

# CPU: an accelerator that is present would change rounding; two devices, so that sharding is tested everywhere
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_num_cpu_devices", 2)
