"""Schemathesis hooks: existing ids for requests, and checks on every response.

`KEIKI_CONFORMANCE_IDS` holds a JSON object: `sandbox` and `snapshot`, ids that exist and stay; `spare`, ids that may
be deleted. Without them nearly every request would be a 404.
"""

import json
import os
import random

import schemathesis

IDS = json.loads(os.environ["KEIKI_CONFORMANCE_IDS"])
SPARE = list(IDS["spare"])
# These delete the sandbox that later requests need.
ENDING = {"delete_sandbox"}


@schemathesis.serializer("application/x-tar")
def archive(context, value):
    """Raw bytes. Other tests check which archives are rejected; here every status must be a declared one."""
    value = getattr(value, "data", value)
    return value if isinstance(value, bytes) else str(value).encode()


@schemathesis.hook
def map_path_parameters(context, parameters):
    """Mostly existing ids, sometimes generated ones."""
    operation = context.operation
    name = operation.definition.raw.get("operationId", "")
    if name == "delete_template":
        # All other requests need the template.
        parameters["name"] = "not-" + str(parameters["name"])
        return parameters
    if not parameters or "id" not in parameters or random.random() < 0.25:
        return parameters
    if operation.path.startswith("/v1/snapshots"):
        parameters["id"] = IDS["snapshot"] if operation.method.lower() != "delete" else parameters["id"]
    elif operation.path.startswith("/v1/sandboxes"):
        if name in ENDING:
            if SPARE:
                parameters["id"] = SPARE.pop()
        else:
            parameters["id"] = IDS["sandbox"]
    return parameters


@schemathesis.hook
def before_call(context, case, kwargs):
    """A stream that never ends would only delay the run."""
    if isinstance(case.query, dict):
        case.query.pop("follow", None)


@schemathesis.hook
def map_body(context, body):
    """Short commands and few forks: this tests responses, not load."""
    if not isinstance(body, dict):
        return body
    name = context.operation.definition.raw.get("operationId", "")
    if name in {"exec", "exec_stream"}:
        body["timeout_seconds"] = 2
    if name in {"fork_sandbox", "fork_tree"} and isinstance(body.get("count"), int) and body["count"] in range(3, 65):
        body["count"] = 2
    if name == "build_template":
        body.pop("force", None)
    return body


@schemathesis.check
def never_500(context, response, case):
    """Every operation declares a 500, and none may return it."""
    if response.status_code == 500:
        raise AssertionError(f"the node failed: {response.text[:300]}")


@schemathesis.check
def errors_are_sentences(context, response, case):
    """Every error body is `{"error": "<sentence>"}`."""
    if response.status_code < 400:
        return
    sentence = json.loads(response.text)["error"]
    assert isinstance(sentence, str) and sentence, response.text
