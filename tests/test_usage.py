"""Accounting files of kernels new and old as figures, and figures as words."""

from __future__ import annotations

import pytest

from torchtuned.reports import usage
from torchtuned.reports.usage import GpuFigures, duration


def test_cpu_stat_with_and_without_a_quota() -> None:
    full = (
        "usage_usec 2500000\nuser_usec 2000000\nsystem_usec 500000\nnr_periods 10\nnr_throttled 3\nthrottled_usec 40\n"
    )
    assert usage.cpu_stat(full) == {"usage_s": 2.5, "user_s": 2.0, "system_s": 0.5, "periods": 10, "throttled": 3,
                                    "throttled_s": 4e-05}  # fmt: skip
    assert usage.cpu_stat("usage_usec 1\nuser_usec 1\nsystem_usec 0\n").keys() == {"usage_s", "user_s", "system_s"}
    assert usage.cpu_stat("") == {}


def test_io_stat_adds_devices_up() -> None:
    text = "8:0 rbytes=10 wbytes=1 rios=9\n259:0 rbytes=5 wbytes=2\n8:16\n"
    assert usage.io_stat(text) == {"read_bytes": 15, "write_bytes": 3}


def test_pressure_of_kernels_with_and_without_full() -> None:
    text = "some avg10=1.50 avg60=0 avg300=0 total=2000000\nfull avg10=0.25 avg60=0 avg300=0 total=1000000\n"
    assert usage.pressure(text) == {"some_s": 2.0, "some_10": 1.5, "full_s": 1.0, "full_10": 0.25}
    assert usage.pressure("some avg10=0.00 avg60=0 avg300=0 total=0") == {"some_s": 0.0, "some_10": 0.0}
    assert usage.pressure("") == {}


def test_memory_by_node() -> None:
    text = "anon N0=100 N1=20\nfile N0=1 N1=2\nkernel_stack N0=900 N1=900\n"
    assert usage.by_node(text) == {0: 101, 1: 22}


def test_gpu_samples_add_up_and_go_on_after_a_restart() -> None:
    first = GpuFigures()
    first.add(100, 10, 50.0, 40)
    first.add(0, 30, None, 45)
    again = GpuFigures(first.figures())
    again.add(20, 20, 70.0, None)
    again.add(None, None, None, None)
    assert again.figures() == {"samples": 4, "utilization_mean": 40, "utilization_samples": 3, "memory_max": 30,
                               "power_max": 70, "temperature_max": 45}  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.9, "59.9 s"), (60, "1 min 0 s"), (3599.7, "1 h 0 min"), (93784, "1 d 2 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
