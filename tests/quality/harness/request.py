"""The request file of the harness: which tasks, lengths, seeds and budgets.

    {
      "tasks": ["needle_recall", "variable_tracking"],   names of tasks/registry.py, or of
                                                          tasks/text.py with a tokenizer
      "lengths": [4096, 32768],                           tokens; 256 to 131072
      "seeds": [0, 1, 2],                                 one example each
      "budgets": [{"name": "29 %", "retention": 0.29}],   fields of sparsegdn_client.Budget; dense
                                                          is always measured first
      "controls": ["random", "shuffled"],                 optional: masks no server would choose
      "params": {"kind": "phrases"},                      optional: of every task, see families.py
      "tokenizer": "FOLDER" or "bytes", "chat": false     optional: text instead of token ids
    }
"""

import dataclasses
import json

from tasks import registry, text

CONTROLS = ("random", "shuffled")
_FIELDS = ("mode", "retention", "coverage", "min_retention", "max_retention", "keep_first",
           "keep_last", "selector", "solver", "local")


@dataclasses.dataclass(frozen=True)
class Request:
    tasks: tuple
    lengths: tuple
    seeds: tuple
    budgets: tuple  # of (name, dict of Budget's fields)
    controls: tuple = ()
    params: dict = dataclasses.field(default_factory=dict)
    tokenizer: str = ""
    chat: bool = False


def _numbers(data, name, least, most):
    values = data.get(name)
    if not isinstance(values, list) or not values:
        raise ValueError(f"{name}: {values!r}, must be a list of integers")
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"{name}: {value!r}, must be in [{least}, {most}]")
    return tuple(values)


def _words(values, name, allowed):
    for value in values:
        if value not in allowed:
            raise ValueError(f"{name}: {value!r}, must be one of {', '.join(allowed)}")
    return tuple(values)


def parse(data):
    """The Request of a decoded file. ValueError names field, got and wanted."""
    known = [field.name for field in dataclasses.fields(Request)]
    for name in data:
        if name not in known:
            raise ValueError(f"{name}: unknown field, must be one of {', '.join(known)}")
    tokenizer = data.get("tokenizer", "")
    tasks = _words(data.get("tasks", ()), "tasks", text.TASKS if tokenizer else registry.TASKS)
    if not tasks:
        raise ValueError("tasks: none, must name at least one")
    budgets = []
    for budget in data.get("budgets", []):
        fields = {key: value for key, value in budget.items() if key != "name"}
        for key in fields:
            if key not in _FIELDS:
                raise ValueError(f"budgets: field {key!r}, must be one of {', '.join(_FIELDS)}")
        budgets.append((str(budget.get("name", fields)), fields))
    names = [name for name, _ in budgets]
    if len(set(names)) < len(names) or "dense" in names:
        raise ValueError(f"budgets: names {names}, must differ from each other and from dense")
    controls = _words(data.get("controls", ()), "controls", CONTROLS)
    if controls and tokenizer:
        raise ValueError("controls: with a tokenizer, must be empty")
    return Request(tasks, _numbers(data, "lengths", registry.MIN_LENGTH, registry.MAX_LENGTH),
                   _numbers(data, "seeds", 0, 2**31), tuple(budgets), controls,
                   data.get("params", {}), tokenizer, bool(data.get("chat", False)))


def load(path):
    with open(path, encoding="utf-8") as file:
        return parse(json.load(file))
