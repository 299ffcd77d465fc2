"""What only a cluster would read, held against what it will be held against there: the schema of a RayService,
Serve's own, and the linters of Dockerfiles and YAML."""

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import ray
import yaml
from ray.serve.schema import ServeDeploySchema

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "serve_configs"
DOCKERFILE = CONFIGS / "docker" / "Dockerfile"
KUBERAY = CONFIGS / "kuberay.yaml"


def read(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def ray_service_schema():
    """Strict, as `kubectl apply --validate=strict` is: a field that it doesn't know is a mistake."""
    packed = (Path(__file__).parent / "rayservice_v1.json.gz").read_bytes()
    return forbid_unknown(json.loads(gzip.decompress(packed)))


def forbid_unknown(schema):
    if isinstance(schema, list):
        return [forbid_unknown(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: forbid_unknown(value) for key, value in schema.items()}
    if isinstance(made.get("properties"), dict) and made.get("type") == "object":
        made.setdefault("additionalProperties", False)
    return made


@pytest.fixture
def ray_service():
    return read(KUBERAY)


# ---------------------------------------------------------------- RayService
def test_the_ray_service_is_one(ray_service, ray_service_schema):
    jsonschema.Draft7Validator.check_schema(ray_service_schema)
    jsonschema.validate(ray_service, ray_service_schema)
    assert (ray_service["apiVersion"], ray_service["kind"]) == ("ray.io/v1", "RayService")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda spec: spec.update(serveConfigV1=""),
        lambda spec: spec["rayClusterConfig"]["workerGroupSpecs"][0].update(minReplicas="1"),
        lambda spec: spec["rayClusterConfig"]["headGroupSpec"].pop("template"),
        lambda spec: spec["rayClusterConfig"]["workerGroupSpecs"][1]["template"]["spec"]["containers"][0].update(
            gpus=1
        ),
    ],
)  # fmt: skip
def test_the_schema_would_say_so_if_it_were_none(ray_service, ray_service_schema, spoil):
    spoil(ray_service["spec"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(ray_service, ray_service_schema)


def test_it_serves_what_autoscaling_yaml_says(ray_service):
    assert yaml.safe_load(ray_service["spec"]["serveConfigV2"]) == read(CONFIGS / "autoscaling.yaml")


def test_its_nodes_have_what_the_deployments_ask_for(ray_service):
    spec = ray_service["spec"]["rayClusterConfig"]
    assert spec["rayVersion"] == ray.__version__
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    (application,) = yaml.safe_load(ray_service["spec"]["serveConfigV2"])["applications"]
    asked = {each["name"]: each["ray_actor_options"] for each in application["deployments"]}
    assert asked["Talker"]["num_gpus"] + asked["Codec"]["num_gpus"] <= 1 < 2 * asked["Talker"]["num_gpus"]
    scaling = application["args"]["autoscaling"]
    assert groups["one-gpu"]["maxReplicas"] == scaling["talker"]["max_replicas"]
    ingress = json.loads(json.loads(groups["ingress"]["rayStartParams"]["resources"]))
    (front,) = [each for each in application["deployments"] if each["name"] == "Ingress"]
    assert ingress["ingress"] * groups["ingress"]["minReplicas"] >= front["num_replicas"]
    images = {
        container["image"]
        for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
        for container in group["template"]["spec"]["containers"]
    }
    assert len(images) == 1


# ---------------------------------------------------------------- Serve's schema
@pytest.mark.parametrize("path", sorted(set(CONFIGS.glob("*.yaml")) - {KUBERAY}), ids=lambda path: path.name)
def test_serve_reads_every_config(path):
    ServeDeploySchema.model_validate(read(path))


# ---------------------------------------------------------------- linters
def tool(name):
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    assert found, f"{name} is in the dev extra"
    return found


def test_the_dockerfile_has_no_complaint_of_hadolint():
    run = subprocess.run(
        [tool("hadolint"), str(DOCKERFILE)], capture_output=True, text=True, timeout=240, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_every_config_passes_yamllint():
    rules = (
        "{extends: default, rules: {line-length: {max: 120}, document-start: disable, "
        "comments: {min-spaces-from-content: 1}, braces: {max-spaces-inside: 0}}}"
    )
    files = [str(path) for path in sorted(CONFIGS.glob("*.yaml"))]
    run = subprocess.run(
        [tool("yamllint"), "--strict", "-d", rules, *files],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, "")


def test_what_the_image_copies_is_not_ignored_and_is_there():
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line[:1] == "!"
    }
    copied = set()
    for line in DOCKERFILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("COPY"):
            _, *words = line.split()
            copied.update([word for word in words if not word.startswith("--")][:-1])
    assert copied == kept
    assert not [name for name in copied if not (ROOT / name).exists()]


def test_the_image_runs_a_config_of_this_repository():
    (command,) = [
        line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if line.startswith("CMD")
    ]
    assert (ROOT / json.loads(command.removeprefix("CMD "))[-1]).is_file()
