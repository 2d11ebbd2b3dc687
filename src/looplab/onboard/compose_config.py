"""Prints the config that Hydra composes, as JSON: python compose_config.py FOLDER NAME [OVERRIDE…]

The application itself is not imported. Imports nothing of looplab; works on Python 3.8 and later.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    folder, name, *overrides = sys.argv[1:]
    with initialize_config_dir(config_dir=folder, version_base=None):
        print(json.dumps(OmegaConf.to_container(compose(name, overrides))))


if __name__ == "__main__":
    main()
