"""FlashInfer's submodule of this name: merging of attention states."""

from tritonattn.merge import merge_state, merge_state_in_place, merge_states

__all__ = ["merge_state", "merge_state_in_place", "merge_states"]
