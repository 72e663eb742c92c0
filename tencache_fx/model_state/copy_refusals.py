"""What somebody is told who reads, or has written to, the copy of an offloaded parameter that has not its value."""

from tencache_fx.planning.problem import Tier


def refusal_of(name: str, tier: Tier) -> str:
    """Return what somebody is told who reads a parameter that is not on the device."""
    place = "disk" if tier is Tier.NVME else "host memory"
    return (
        f"{name} is offloaded to {place}, and nothing has loaded it: read it inside `with tencache_fx.summon("
        "model):`, in a function compiled with backend='tencache', or in the forward of the module that has it, "
        "as a module also has what its __init__ takes over, by self.weight = other.weight."
    )


def lost_write_to(name: str) -> str:
    """Return what somebody is told whose write to the host copy is lost: the device copy is newer."""
    return (
        f"{name} was written to by a tensor of a state_dict that is older than its last update, which was "
        "on the device; what was written is dropped: call state_dict() anew after step(), or use summon."
    )
