"""Start a script with other constants: python with_config.py CONFIG.json SCRIPT [ARGUMENTS…]

The values of the config replace those that the script binds at its top level (`LR = 0.1`, `CONFIG = {"lr": 0.1}`). The
file is not changed. Made by `looplab init` for scripts that have no options.
"""

import ast
import json
import sys


def literal(value: object) -> ast.expr:
    return ast.parse(repr(value), mode="eval").body


def replaced(node: ast.Dict, values: dict) -> None:
    for index, key in enumerate(node.keys):
        if isinstance(key, ast.Constant) and key.value in values:
            new, old = values[key.value], node.values[index]
            if isinstance(new, dict) and isinstance(old, ast.Dict):
                replaced(old, new)
            else:
                node.values[index] = ast.copy_location(literal(new), old)


def main() -> None:
    config_file, script, *arguments = sys.argv[1:]
    with open(config_file) as file:
        config = json.load(file)
    with open(script) as file:
        tree = ast.parse(file.read(), script)
    for node in tree.body:
        target = (
            node.targets[0]
            if isinstance(node, ast.Assign)
            else node.target
            if isinstance(node, ast.AnnAssign)
            else None
        )
        if not isinstance(target, ast.Name) or target.id not in config or node.value is None:
            continue
        new = config[target.id]
        if isinstance(new, dict) and isinstance(node.value, ast.Dict):
            replaced(node.value, new)
        else:
            node.value = ast.copy_location(literal(new), node.value)
    ast.fix_missing_locations(tree)
    sys.argv = [script, *arguments]
    sys.path[0] = script.rpartition("/")[0] or "."
    module = type(sys)("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    exec(compile(tree, script, "exec"), module.__dict__)  # noqa: S102 (this program is there to run the script)


if __name__ == "__main__":
    main()
