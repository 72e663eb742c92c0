import dataclasses
import json
import logging
import os
from decimal import Decimal
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor import config as inductor_config

from tencache_fx import close, compat
from tencache_fx import options as options_module
from tencache_fx.errors import OptionError
from tencache_fx.hardware import device_memory
from tencache_fx.hardware.capacity import Space, device_space, disk_space, host_space
from tencache_fx.option_values import read_size
from tencache_fx.options import SETTINGS, Options, Settings

CPU = torch.device("cpu")
GiB = 1 << 30


def resolve(**options):
    return Options.resolve(options, device=CPU)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (7, 7),
        ("536870912", 536870912),
        ("12GiB", 12 * GiB),
        ("12GB", 12_000_000_000),
        ("512 MiB", 512 << 20),
        ("1.5kB", 1500),
        ("2tib", 2 << 40),
        (" 3 B ", 3),
    ],
)
def test_sizes_mean_what_they_say(text, nbytes):
    assert read_size("device_budget", text).nbytes == nbytes


@given(st.integers(1, 10**6), st.sampled_from(["", " "]), st.sampled_from(["kB", "MB", "GB", "kiB", "MiB", "GiB"]))
def test_a_size_with_a_unit_is_number_times_unit(number, gap, unit):
    base = 1024 if "i" in unit else 1000
    power = 1 + "kMG".index(unit[0])
    assert read_size("host_budget", f"{number}{gap}{unit}").nbytes == number * base**power


@given(st.decimals(min_value="0.001", max_value="100", places=3))
def test_shares_are_exact(percent):
    assert read_size("host_budget", f"{percent}%").share == Decimal(percent) / 100


@pytest.mark.parametrize("value", ["twelve", "12 pears", "", "GiB", "1e9", 1.5, True, [1], "12GiB 3", "%", "0x10"])
def test_an_unreadable_size_is_quoted_with_examples(value):
    with pytest.raises(OptionError, match="device_budget=.* is not a size; .*12GiB") as error:
        read_size("device_budget", value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("value", [0, -1, "0", "-3GiB", "0%", "0.1B"])
def test_sizes_are_above_zero(value):
    with pytest.raises(OptionError, match="must be above zero"):
        read_size("device_budget", value)


def test_more_than_everything_is_refused():
    with pytest.raises(OptionError, match="at most 100%"):
        read_size("device_budget", "101%")


def test_defaults_on_a_cpu():
    found = resolve()
    assert found.device_budget is None
    assert 0 < found.host_budget <= host_space().total_bytes * 8 // 10
    assert (found.spill_dir, found.spill_budget) == ((), 0)
    assert (found.policy, found.recompute, found.compiler) == ("joint", "auto", "inductor")
    assert (found.calibrate, found.dump_dir, found.checksum, found.inductor) == (True, None, False, ())


def test_a_share_is_of_the_tier(tmp_path):
    found = resolve(device_budget="50%", host_budget="25%", spill_dir=tmp_path, spill_budget="10%")
    assert found.device_budget == device_space(CPU).total_bytes // 2
    assert found.host_budget == host_space().total_bytes // 4
    assert found.spill_budget == pytest.approx(disk_space([tmp_path]).available_bytes / 10, rel=0.05)


@pytest.mark.parametrize(
    ("asked", "found"), [("4GiB", 4 << 30), ("7GiB", 7 << 30), ("7.9GiB", 15 << 29), ("8GiB", 15 << 29)]
)
def test_a_budget_close_to_what_torch_may_take_leaves_room_for_gaps(asked, found, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(
        options_module, "device_space", lambda device: Space(total_bytes=8 << 30, available_bytes=8 << 30)
    )
    monkeypatch.setattr(device_memory, "device_space", options_module.device_space)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    assert options_module._device_budget(read_size("device_budget", asked), torch.device("cuda", 0)) == found
    assert ("plans hold 8.05 GB" in caplog.text) == (found == 15 * GiB // 2)


@pytest.mark.parametrize(("total", "lost"), [(100, 100), (260, 250)])
def test_gaps_that_are_there_and_that_are_to_come_are_not_planned_with(total, lost, monkeypatch):
    """Of 1600 bytes a sixteenth; or what is there, 200, and a thirty-second."""
    segment = {"device": 0, "total_size": total, "active_size": 60, "is_expandable": False}
    others = [{"device": 1}, {"active_size": 0}, {"is_expandable": True}]  # another device's, empty, one that grows
    monkeypatch.setattr(device_memory, "device_space", lambda device: Space(total_bytes=3200, available_bytes=1600))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [segment, *(segment | other for other in others)])
    assert device_memory.tensor_bytes(torch.device("cuda", 0)) == 1600 - lost


def test_a_disk_gets_nine_tenths_of_its_free_space_once_per_filesystem(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    found = resolve(spill_dir=[first, str(second), first])
    assert found.spill_dir == (first, second)
    assert found.spill_budget == pytest.approx(disk_space([tmp_path]).available_bytes * 0.9, rel=0.05)


def test_options_beat_configure_beats_environment_beats_defaults(monkeypatch):
    monkeypatch.setenv("TENCACHE_HOST_BUDGET", "1MiB")
    monkeypatch.setenv("TENCACHE_POLICY", "none")
    monkeypatch.setenv("TENCACHE_RECOMPUTE", "none")
    SETTINGS.configure(host_budget="2MiB", policy="10cache")
    found = resolve(host_budget="3MiB")
    assert (found.host_budget, found.policy, found.recompute) == (3 << 20, "10cache", "none")
    assert found.compiler == "inductor"


def test_the_environment_spells_every_kind_of_value(monkeypatch, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    values = {
        "DEVICE_BUDGET": "none",
        "SPILL_DIR": f"{tmp_path}/one{os.pathsep}{tmp_path}/two",
        "SPILL_BUDGET": "1MB",
        "CALIBRATE": "0",
        "CHECKSUM": "Yes",
        "DUMP_DIR": str(tmp_path / "new" / "dump"),
        "INDUCTOR": '{"max_autotune": true, "epilogue_fusion": false}',
    }
    for name, text in values.items():
        monkeypatch.setenv(f"TENCACHE_{name}", text)
    found = resolve()
    assert found.device_budget is None
    assert found.spill_dir == (tmp_path / "one", tmp_path / "two")
    assert found.spill_budget == 1_000_000
    assert (found.calibrate, found.checksum) == (False, True)
    assert found.dump_dir == tmp_path / "new" / "dump"
    assert found.dump_dir.is_dir()
    assert found.inductor == (("epilogue_fusion", False), ("max_autotune", True))


def test_a_wrong_value_names_where_it_came_from(monkeypatch):
    monkeypatch.setenv("TENCACHE_CALIBRATE", "perhaps")
    with pytest.raises(OptionError, match="TENCACHE_CALIBRATE='perhaps'"):
        resolve()


def test_an_unknown_option_names_the_nearest_and_all():
    with pytest.raises(OptionError, match="device_bugdet is not an option; did you mean device_budget") as error:
        resolve(device_bugdet="1GiB")
    assert all(field.name in str(error.value) for field in dataclasses.fields(Options))


def test_an_unknown_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("TENCACHE_POLICE", "none")
    with pytest.raises(OptionError, match="TENCACHE_POLICE is not an option; did you mean policy"):
        resolve()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("policy", "terraio", "did you mean teraio"),
        ("policy", 3, "choose one of: none, 10cache, teraio"),
        ("recompute", "all", "choose one of: auto, none"),
        ("compiler", "eagre", "did you mean eager"),
        ("calibrate", 2, "neither true nor false"),
        ("checksum", "maybe", "neither true nor false"),
        ("inductor", "{", "is not JSON"),
        ("inductor", [1], "is not a mapping"),
        ("spill_dir", 3, "is not a directory"),
        ("host_budget", None, "pinned memory needs a limit"),
        ("spill_budget", None, "a disk can fill up"),
        ("spill_budget", "1GB", "without spill_dir"),
        pytest.param("spill_dir", "x" * 5000, r"xx\.\.\. \(\d+ characters\) is not a directory", id="spill_dir-long"),
        pytest.param("dump_dir", "x" * 5000, "characters. cannot be made: File name too long", id="dump_dir-long"),
        ("spill_dir", "~nosuchuser/x", "names the home of a user who is not known"),
        ("dump_dir", "a\0b", "is not a directory"),
        pytest.param("inductor", "[" * 100_000, "is not JSON .it nests too deep", id="inductor-deep"),
        ("inductor", (([], 1),), "is not a mapping"),
        ("device_budget", "9" * 40, "is more than any machine has"),
        pytest.param("device_budget", 10**5000, "a number of 16610 bits is more than", id="device_budget-long"),
        ("host_budget", [10**5000], "is not a size"),
        ("host_budget", "8388608 TiB", "is more than any machine has"),
        pytest.param("policy", 10**5000, "is unknown; choose one of", id="policy-long"),
        pytest.param("checksum", "x" * 5000, "neither true nor false", id="checksum-long"),
    ],
)
def test_wrong_values_are_refused_in_one_line(name, value, message):
    with pytest.raises(OptionError, match=message) as error:
        resolve(**{name: value})
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600
    assert str(error.value).startswith(name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({5: 1}, "^5 is not an option; the options are: device_budget, "),
        ({None: 1}, "^None is not an option; the options are: device_budget, "),
        ([5], r"^options=\[5\] is not a mapping; give options by name: device_budget, "),
        (5, "^options=5 is not a mapping"),
    ],
)
def test_options_without_names_are_refused(given, message):
    with pytest.raises(OptionError, match=message):
        Options.resolve(given, device=CPU)


@pytest.mark.parametrize("name", ["device_budget", "host_budget"])
def test_a_budget_above_what_exists_is_refused_with_both_numbers(name):
    with pytest.raises(OptionError, match=rf"{name} is 1\.13 PB, but the memory of .* is .* GB; lower {name}"):
        resolve(**{name: "1PiB"})


def test_a_spill_budget_above_the_free_space_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"spill_budget is 1\.13 PB, but the free space of .* is"):
        resolve(spill_dir=tmp_path, spill_budget="1PiB")


@pytest.mark.parametrize(
    ("mode", "given", "message"),
    [
        ("reduce-overheads", {}, "mode='reduce-overheads' is unknown; did you mean reduce-overhead"),
        (None, {"max_autotun": True}, "inductor setting max_autotun is unknown; did you mean max_autotune"),
        (None, {"triton.cudagraph": True}, "triton.cudagraph is unknown; did you mean triton.cudagraphs"),
        (None, {"triton": {}}, "inductor setting triton is unknown"),
        (None, {"max_autotune": "yes"}, "inductor setting max_autotune='yes' is a str; give a bool"),
        (None, {"custom_partitioner_fn": len}, "custom_partitioner_fn .* the plan"),
        (None, {"post_grad_custom_post_pass": len}, "post_grad_custom_post_pass .* the plan"),
    ],
)
def test_inductor_settings_that_cannot_be_are_refused(mode, given, message):
    with pytest.raises(OptionError, match=message) as error:
        compat.inductor_settings(mode, given)
    assert "\n" not in str(error.value)


def test_every_setting_of_inductor_may_be_given():
    """As it is by default; a number without a point is as good as one with it."""
    known = inductor_config.get_config_copy()
    assert compat.inductor_settings(None, known) == known
    number = next(name for name in known if inductor_config.get_type(name) is float)
    assert compat.inductor_settings(None, {number: 1}) == {number: 1}


@pytest.mark.parametrize("name", ["custom_partitioner_fn", "post_grad_custom_post_pass"])
def test_hooks_set_in_the_config_of_inductor_are_not_lost_either(name):
    with inductor_config.patch({name: len}), pytest.raises(OptionError, match=f"{name} .* the plan"):
        compat.inductor_settings(None, {})


def test_inductor_settings_are_the_modes_and_then_ones_own():
    assert compat.inductor_settings(None, {}) == compat.inductor_settings("default", {}) == {}
    found = compat.inductor_settings("max-autotune", {"max_autotune": False, "force_disable_caches": True})
    assert found["max_autotune"] is False
    assert found["triton.cudagraphs"] is True
    assert found["force_disable_caches"] is True
    assert compat.overruled({**found, "allow_buffer_reuse": True, "reorder_for_peak_memory": False}) == (
        "allow_buffer_reuse=True",
        "triton.cudagraphs=True",
    )


def layers():
    return torch.nn.Sequential(*(m for _ in range(16) for m in (torch.nn.Linear(64, 64), torch.nn.Tanh())))


@pytest.mark.parametrize(("budget", "lines"), [(1_000_000, 1), (None, 0)])
def test_one_line_tells_what_a_region_with_a_plan_runs_without(caplog, budget, lines):
    configure = {"inductor": {"triton.cudagraphs": True}, "compiler": "eager", "calibrate": False}
    run = torch.compile(layers(), backend="tencache", options={**configure, "device_budget": budget})
    run(torch.randn(256, 64)).sum().backward()
    found = [record for record in caplog.records if "triton.cudagraphs=True" in record.getMessage()]
    assert [record.levelname for record in found] == ["WARNING"] * lines
    close()


def test_an_unknown_mode_is_refused_in_one_sentence():
    run = torch.compile(layers(), backend="tencache", mode="fast")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="OptionError: mode='fast' is unknown"):
        run(torch.randn(256, 64))


def test_directories_must_be_there_and_be_writable(tmp_path):
    with pytest.raises(OptionError, match="spill_dir .*/gone is not a directory"):
        resolve(spill_dir=tmp_path / "gone")
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"dump_dir .*/file/x cannot be made: Not a directory"):
        resolve(dump_dir=tmp_path / "file" / "x")
    with pytest.raises(OptionError, match="spill_dir /proc/self cannot be written to"):
        resolve(spill_dir="/proc/self")


def test_configure_checks_at_once_and_changes_nothing_when_wrong():
    settings = Settings()
    assert dict(settings.configure(policy="none", host_budget="1GiB")) == {"policy": "none", "host_budget": "1GiB"}
    with pytest.raises(OptionError):
        settings.configure(policy="10cache", compiler="gcc")
    assert settings.configure()["policy"] == "none"
    assert dict(settings.configure(reset=True, checksum=True)) == {"checksum": True}
    with pytest.raises(TypeError):
        settings.configure()["policy"] = "teraio"


def test_resolved_options_are_values():
    assert hash(resolve(inductor={"b": 1, "a": 2}, host_budget="1GiB")) == hash(
        resolve(inductor={"a": 2, "b": 1}, host_budget="1GiB")
    )


def test_every_option_is_documented_with_its_default():
    rows = {}
    for line in options_module.__doc__.splitlines():
        cells = [cell.strip() for cell in line.strip("| \n").split("|")]
        if len(cells) == 3 and cells[0] and not cells[0].startswith("-") and cells[0] != "option":
            rows[cells[0]] = cells[1]
    expected = {
        name: str({"Size": "auto"}.get(type(value).__name__, "{}" if name == "inductor" else value))
        for name, value in options_module._DEFAULTS.items()
    }
    assert rows == expected


def fake_root(tmp_path: Path, files: dict[str, str]) -> Path:
    files = {"proc/meminfo": "MemTotal:       1000 kB\nMemAvailable:    600 kB\n", **files}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def cgroup_v2(folder: str, limit: object, used: int, cache: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup{folder}"
    return {
        f"{base}/memory.max": f"{limit}\n",
        f"{base}/memory.current": f"{used}\n",
        f"{base}/memory.stat": f"anon 1\ninactive_file {cache}\n",
    }


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        ({}, 1000 * 1024, 600 * 1024),
        ({"proc/self/cgroup": "0::/\n"}, 1000 * 1024, 600 * 1024),
        ({"proc/self/cgroup": "0::/job\n", **cgroup_v2("/job", 500_000, 300_000, 100_000)}, 500_000, 300_000),
        (
            {"proc/self/cgroup": "0::/a/b\n", **cgroup_v2("/a/b", "max", 5), **cgroup_v2("/a", 90_000, 1)},
            90_000,
            89_999,
        ),
        ({"proc/self/cgroup": "0::/outside/name\n", **cgroup_v2("", 70_000, 80_000)}, 70_000, 0),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/7\n0::/\n",
                "sys/fs/cgroup/memory/docker/7/memory.limit_in_bytes": "400000",
                "sys/fs/cgroup/memory/docker/7/memory.usage_in_bytes": "100000",
                "sys/fs/cgroup/memory/docker/7/memory.stat": "inactive_file 7\ntotal_inactive_file 50000\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
                "sys/fs/cgroup/memory/memory.stat": "",
            },
            400_000,
            350_000,
        ),
    ],
    ids=["none", "v2-root", "v2", "v2-ancestor", "v2-container", "v1"],
)
def test_host_memory_is_what_the_kernel_and_the_cgroups_allow(tmp_path, files, total, available):
    space = host_space(fake_root(tmp_path, files))
    assert (space.total_bytes, space.available_bytes) == (total, available)


def test_inductor_options_come_as_mapping_or_json():
    assert resolve(inductor={"max_autotune": True}).inductor == (("max_autotune", True),)
    assert resolve(inductor=json.dumps({"max_autotune": True})).inductor == (("max_autotune", True),)


def test_the_space_of_a_device_without_a_number_is_that_of_the_current_one(monkeypatch):
    """torch's limit of a process can be asked for by a number only: `torch.device("cuda")` is refused there."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", {0: 0.25, 1: 0.5}.__getitem__)
    assert device_space(torch.device("cuda")) == Space(total_bytes=500, available_bytes=500)
    assert device_space(torch.device("cuda:0")) == Space(total_bytes=250, available_bytes=250)


@pytest.mark.gpu
def test_auto_on_cuda_is_what_this_process_can_have_less_a_margin():
    device = torch.device("cuda")
    held = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    found = Options.resolve({}, device=device)
    most_bytes = 0.9 * (free_bytes + torch.cuda.memory_reserved(device))
    assert 0.99 * 15 / 16 * most_bytes <= found.device_budget <= 1.01 * most_bytes  # it may be an earlier process's
    assert Options.resolve({"device_budget": "50%"}, device=device).device_budget == total_bytes // 2
    del held
