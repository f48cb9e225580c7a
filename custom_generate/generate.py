"""Token trees in the hub's form: ``model.generate(..., custom_generate="<repository>", trust_remote_code=True)``.

Push this folder to a repository of the hub whose README.md begins with the tag ``custom_generate``.  With specinfer
installed no repository is needed: ``model.generate(..., custom_generate=specinfer.custom_generate)``.
"""

from typing import Any

from specinfer import custom_generate


def generate(model: Any, **arguments: Any) -> Any:
    """Generate with token trees; the arguments are those of `generate` and of `specinfer.custom_generate`."""
    return type(model).generate(model, **arguments, custom_generate=custom_generate)  # model.generate may be this one
