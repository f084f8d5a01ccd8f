"""An update runs on the accelerator where that is faster, and never where it gains nothing."""

from hypothesis import given
from hypothesis import strategies as st

from infinity.planner.updates import UpdateRates, updates_on_device

rates = st.floats(1e6, 1e12)


def test_a_link_that_is_faster_than_the_cpu_takes_updates():
    # 14 bytes of weight, gradient and state go, 12 come back; a CPU passes over 26 bytes
    superchip = UpdateRates(cpu=300e9 / 26, device=450e9 / 14)
    workstation = UpdateRates(cpu=100e9 / 26, device=25e9 / 14)
    few_cores = UpdateRates(cpu=20e9 / 26, device=25e9 / 14)
    assert [updates_on_device(each) for each in (superchip, workstation, few_cores)] == [True, False, True]


def test_an_update_that_waits_for_its_drive_stays_on_the_cpu():
    drive = 14e9 / 26
    assert not updates_on_device(UpdateRates(cpu=20e9 / 26, device=450e9 / 14, drive=drive))
    assert updates_on_device(UpdateRates(cpu=10e9 / 26, device=450e9 / 14, drive=drive))


@given(rates, rates, st.none() | rates)
def test_only_a_gain_moves_an_update(cpu, device, drive):
    chosen = updates_on_device(UpdateRates(cpu=cpu, device=device, drive=drive))
    paces = [min(each, drive or each) for each in (cpu, device)]
    assert not chosen or paces[1] > paces[0]
    faster = updates_on_device(UpdateRates(cpu=cpu, device=2 * device, drive=drive))
    assert faster >= chosen
