"""The simulated engine: the workers' contract with the timing of a profile, without weights."""

from epd.engines.sim.faults import Fault, Faults
from epd.engines.sim.fleet import SimFleet
from epd.engines.sim.profile import Profile, load_profile
from epd.engines.sim.run import run_sim_worker
from epd.engines.sim.worker import SimWorker

__all__ = [
    "Fault",
    "Faults",
    "Profile",
    "SimFleet",
    "SimWorker",
    "load_profile",
    "run_sim_worker",
]
