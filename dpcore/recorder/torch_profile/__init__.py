"""Files of ``torch.profiler``: what ranks of torch DDP did, as events of ``dpcore.trace``."""

from dpcore.recorder.torch_profile.clocks import Shifts, align
from dpcore.recorder.torch_profile.events import RankProfile, rank_profile
from dpcore.recorder.torch_profile.file import Profile, is_profile, profile_of

__all__ = [
    "Profile",
    "RankProfile",
    "Shifts",
    "align",
    "is_profile",
    "profile_of",
    "rank_profile",
]
