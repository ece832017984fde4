"""Keys change exactly when a result would."""

import pytest

from agentgym.store.keys import (
    digest_files,
    environment_modules,
    object_name,
    package_folders,
    source_digest,
    source_files,
    step_key,
)

FILES = {
    "agentgym/__init__.py": "",
    "agentgym/train.py": (
        "import agentgym.maths.loss\nfrom agentgym import data\nfrom agentgym.store.posix import"
        " RunStore\n"
    ),
    "agentgym/data.py": "def load():\n    from envs.wire import Reset\n",
    "agentgym/maths/__init__.py": "from .shared import eps\n",
    "agentgym/maths/templates/a/page.html": "",
    "agentgym/maths/loss.py": "from . import kl\nimport torch\n",
    "agentgym/maths/kl.py": "",
    "agentgym/maths/shared.py": "eps = 1\n",
    "agentgym/maths/unused.py": "",
    "agentgym/store/__init__.py": "",
    "agentgym/store/posix.py": "from agentgym import hidden\n",
    "agentgym/hidden.py": "",
    "envs/__init__.py": "",
    "envs/wire.py": "",
    "envs/babyai/__init__.py": "",
    "envs/babyai/game.py": "from envs.base import Env\n",
    "envs/base.py": "",
}
REACHED = [
    "agentgym",
    "agentgym.data",
    "agentgym.maths",
    "agentgym.maths.kl",
    "agentgym.maths.loss",
    "agentgym.maths.shared",
    "agentgym.maths/templates/a/page.html",
    "agentgym.train",
]


@pytest.fixture
def folders(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {name: tmp_path / name for name in ("agentgym", "envs")}


def test_imports_are_followed_into_functions_packages_and_relative_names(folders):
    assert list(source_files(["agentgym.train"], folders)) == [*REACHED, "envs", "envs.wire"]


@pytest.mark.parametrize(
    "around",
    [
        "if x:\n {}",
        "if x:\n pass\nelse:\n {}",
        "if x:\n pass\nelif y:\n {}",
        "try:\n {}\nexcept E:\n pass",
        "try:\n pass\nexcept E:\n {}",
        "try:\n pass\nexcept* E:\n {}",
        "try:\n pass\nfinally:\n {}",
        "for x in y:\n pass\nelse:\n {}",
        "while x: {}",
        "with x:\n {}",
        "match x:\n case 1:\n  {}",
        "class C:\n @f\n async def g(self):\n  async with x:\n   {}",
        "x = 1; {}",
    ],
)
def test_an_import_is_found_wherever_a_statement_may_stand(folders, around):
    (folders["agentgym"] / "maths/kl.py").write_text(around.format("import envs.wire"))
    assert "envs.wire" in source_files(["agentgym.maths.kl"], folders)


def test_a_named_package_brings_its_modules(folders):
    assert list(source_files(["envs.babyai"], folders)) == [
        "envs",
        "envs.babyai",
        "envs.babyai.game",
        "envs.base",
    ]


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("agentgym/maths/kl.py", True),
        ("agentgym/maths/__init__.py", True),
        ("agentgym/maths/templates/a/page.html", True),
        ("envs/wire.py", True),
        ("agentgym/train.py", True),
        ("agentgym/maths/unused.py", False),
        ("agentgym/store/posix.py", False),
        ("agentgym/hidden.py", False),
        ("envs/babyai/game.py", False),
    ],
)
def test_changing_an_imported_file_alone_changes_the_digest(folders, name, counts):
    before = digest_files(source_files(["agentgym.train"], folders))
    path = folders["agentgym"].parent / name
    path.write_text(path.read_text() + "x = 1\n")
    assert (digest_files(source_files(["agentgym.train"], folders)) != before) is counts


def test_where_the_files_lie_does_not_count(folders, tmp_path):
    before = digest_files(source_files(["agentgym.train"], folders))
    moved = {name: path.rename(tmp_path / f"moved-{name}") for name, path in folders.items()}
    assert digest_files(source_files(["agentgym.train"], moved)) == before


def test_an_unknown_module_is_named(folders):
    with pytest.raises(ValueError, match=r"module 'agentgym\.trian' is not in agentgym or envs"):
        source_files(["agentgym.trian"], folders)


def test_the_installed_packages_are_found_and_their_state_rooms_left_out():
    files = source_files(["agentgym.tracking.mlflow"], package_folders())
    # the module itself and its text helpers, without the store
    assert list(files) == ["agentgym", "agentgym.tracking.mlflow", "envs", "envs.plain"]
    assert source_digest(["agentgym.types", "envs.wire"]) == source_digest(
        ["envs.wire", "agentgym.types"]
    )
    assert len(source_digest(["agentgym.types"])) == 64


def test_a_step_key_changes_with_each_of_its_parts():
    def key(step="stage-1", lr=1e-3, data="aa", source="bb"):
        return step_key(step, config={"lr": lr, "seed": 0}, inputs={"data": data}, source=source)

    assert key() == step_key(
        "stage-1", inputs={"data": "aa"}, source="bb", config={"seed": 0, "lr": 0.001}
    )
    assert len({key(), key(step="stage-2"), key(lr=2e-3), key(data="ab"), key(source="bc")}) == 5


def test_object_names_fit_kubernetes():
    assert object_name("0123456789abcdef" * 4, "stage-2", 1) == "r0123456789ab-s2-a1"
    assert object_name("0123456789abcdef" * 4, "evaluate-warm-start", 12) == "r0123456789ab-ews-a12"
    with pytest.raises(ValueError, match="12 lower-case hex"):
        object_name("babyai", "stage-2", 1)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ("tides/game.py", "HIGH = 3"),
        ("tides/levels.json", '["spring", "neap"]'),
        (
            "tides_env-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tides-env\nVersion: 1.1\n",
        ),
    ],
)
def test_an_installed_environment_is_in_the_keys_with_its_data_and_its_version(
    install, monkeypatch, changed, text
):
    """Include modules that it imports by name only."""
    site = install("tides_env", "", "agentgym.envs", "tides", "tides.play:spec").parent
    (site / "tides").mkdir()
    for name, source in (
        ("__init__.py", ""),
        ("play.py", "import importlib\ngame = importlib.import_module('tides' + '.game')\n"),
        ("game.py", "HIGH = 2\n"),
        ("levels.json", '["spring"]'),
    ):
        (site / "tides" / name).write_text(source)
    assert environment_modules("tides") == ("envs.server", "tides.play")
    assert environment_modules("babyai") == ("envs.server", "envs.babyai")
    assert environment_modules("elsewhere") == ("envs.server",)
    forget = source_digest.__globals__["_digest_once"].cache_clear
    before = source_digest(environment_modules("tides"))
    forget()
    assert source_digest(environment_modules("tides")) == before
    (site / changed).write_text(text)
    forget()
    assert source_digest(environment_modules("tides")) != before
