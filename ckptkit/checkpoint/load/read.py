"""Plans the reads of a load, from bytes in files to memory, before the training state is changed."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import TensorEntry
from ckptkit.checkpoint.load.options import LoadOptions
from ckptkit.checkpoint.load.plan import LoadPlan, OptimizerPlan
from ckptkit.checkpoint.state.layout import as_global
from ckptkit.checkpoint.state.local_part import PartView, part_view, parts_here
from ckptkit.checkpoint.state.optimizer.layout import PLAIN, SHARD, Held, held_by_any, memory_order
from ckptkit.checkpoint.state.optimizer.restore import is_paged, new_paged, new_state_tensor
from ckptkit.checkpoint.state.train_state import PerRank, is_stateful
from ckptkit.checkpoint.state.values import encode, in_order, references
from ckptkit.checkpoint.state.views import View, in_one_memory, memories
from ckptkit.errors import LoadError, SaveError
from ckptkit.formats.dcp.host_bytes import local_part, without_subclass
from ckptkit.formats.dcp.shared_memory import Claim, are_one, check_claims, overlapping
from ckptkit.formats.dcp.subclasses import outer_name, with_lower_bits
from ckptkit.formats.trainers.shards import LocalPart
from ckptkit.storage.store import Store
from ckptkit.units import format_size, parse_size

if TYPE_CHECKING:
    import torch


class Reading:
    """Plans reads into the live tensors or, with `atomic`, into a second copy. Creating a plan reads nothing.

    Attributes:
        first: Reads the tensors that objects refer to, so that the objects can be validated before the live state is
            changed. None if `filler` reads these tensors, too.
        filler: Reads all other tensors.
        states: For each optimizer in the plan, the states that it has after the load, by FQN and state name.
        merges: Whether the states of several ranks are merged.
        refs: The tensors that objects refer to, by key.
        held: Size of the second copy in bytes.
    """

    def __init__(self, plan: LoadPlan, store: Store, options: LoadOptions, *, world_size: int) -> None:
        import torch

        from ckptkit.formats.dcp.fill import Filler, Verify

        verify = Verify.READ if options.verify else Verify.OFF
        self.filler = Filler(store, verify=verify, cast=True)
        # On an object store, read the tensors in objects with the rest, which saves a round trip. With several ranks,
        # read them first: if ranks share reads, a rank gets other ranks' data only after its own reads. A function that
        # merges the states of several ranks may refuse them, so it must run before anything is changed.
        self.merges = any(target.merge is not None for target in plan.objects)
        apart = not store.asking_costs or world_size > 1 or self.merges
        self.first = Filler(store) if apart else None
        self.held = 0
        self._atomic = options.atomic
        # Each: a live tensor, the tensor to copy into it, and the parts of both to copy (None: everything).
        self._copies: list[tuple[torch.Tensor, torch.Tensor, Sequence[LocalPart] | None]] = []
        self._lower_bits: dict[int, torch.Tensor] = {}  # by the id of the live tensor in `_copies`
        views = []
        for target in plan.models:
            live = as_global(target.key, target.live, target.shards)
            bits, filled = target.lower_bits, plan.filled.get(target.entry.name)
            view = self._read(live, target.entry, beside=options.atomic or bits is not None, filled=filled)
            views.append(view)
            if bits is not None:
                new = torch.zeros(tuple(view.local.shape), dtype=getattr(torch, bits.dtype))
                self._lower_bits[id(view.local)] = new
                self.held += new.nbytes
                inside = view.within(plan.filled[bits.name]) if bits.name in plan.filled else view
                self.filler.add_parts(bits, inside.parts, new)
        shared = overlapping([view.local for view in views])
        groups = [[views[i].claim(plan.models[i].entry) for i in rows] for rows in shared]
        for twins in plan.twins:
            parts = [part_view(twin.key, as_global(twin.key, twin.live, twin.shards)) for twin in twins]
            groups.append([part.claim(twin.entry) for part, twin in zip(parts, twins, strict=True)])
        check_claims(store, groups)
        self._joint, self._apart = _overlaps(plan, views, store) if plan.optimizers else (set(), set())
        self.states = [self._optimizer(optimizer) for optimizer in plan.optimizers]
        if options.atomic:
            self._check_memory(None if options.max_memory is None else parse_size(options.max_memory, "max_memory"))
        self.refs = self._references(plan)
        self.filler.plan()
        if not options.atomic and store.sizes_are_free:
            # Find short files before anything is read into the live state. Skip this on object stores, where objects
            # are never truncated and each check is a request.
            self.filler.check_sizes()

    def finish(self) -> None:
        """Copy data that was read into new memory to the live tensors."""
        import torch

        from ckptkit.formats.dcp.fill import part_of

        with torch.no_grad():
            for live, read, parts in self._copies:
                bits = self._lower_bits.get(id(live))
                wide = read if bits is None else with_lower_bits(read, bits)
                if parts is None:
                    live.copy_(wide)
                    continue
                for part in parts:
                    to, new = (part_of(one, part.local_offsets, part.box.sizes) for one in (live, wide))
                    to.copy_(new)
        self._copies.clear()

    # --- what is read into which memory

    def _read(
        self, live: torch.Tensor, entry: TensorEntry, *, beside: bool = False, filled: Sequence[Box] | None = None
    ) -> PartView:
        """Schedule reads of this rank's part of a tensor, or only of the regions in `filled`.

        The reads fill the live tensor. With `beside`, or for a meta tensor, the reads fill new memory, and `finish`
        copies the new memory to the live tensor.
        """
        view = part_view(entry.name, live)
        if filled is not None:
            view = view.within(filled)
        self._fill(view.local, entry, view.parts, beside=beside, is_whole=filled is None)
        return view

    def _fill(
        self,
        local: torch.Tensor,
        entry: TensorEntry,
        parts: Sequence[LocalPart],
        *,
        beside: bool,
        is_whole: bool = True,
    ) -> None:
        """Schedule reads of `parts` into `local`. Elements outside `parts` stay unchanged.

        With `beside`, or if `local` is a meta tensor, the reads fill new memory, and `finish` copies it to `local`.
        `is_whole` is True if `parts` cover all elements of `local`.
        """
        import torch

        target = local
        if beside or local.is_meta:
            target = torch.empty(tuple(local.shape), dtype=getattr(torch, entry.dtype))
            self.held += 0 if local.is_meta else target.nbytes
            self._copies.append((local, target, None if is_whole else parts))
        self.filler.add_parts(entry, parts, target)

    def _optimizer(self, plan: OptimizerPlan) -> dict[str, dict[str, torch.Tensor]]:
        """Schedule reads of an optimizer's states. Return the states after the load, by FQN and state name.

        A live state is filled in place if a new state would have the same shape and placement. Otherwise, a new state
        replaces it.
        """
        import torch

        on_device = {
            id(parameter): bool(group.get("fused") or group.get("capturable"))
            for group in plan.optimizer.param_groups
            for parameter in group["params"]
        }
        states: dict[str, dict[str, torch.Tensor]] = {}
        for fqn, parameter in plan.parameters.items():
            wanted = dict(plan.states.get(fqn, {}))
            master = plan.masters.get(fqn)
            if master is not None and plan.master_name is not None:
                wanted[plan.master_name] = master
            live, wholes = plan.live.get(fqn, {}), plan.wholes.get(fqn, {})
            if wanted or wholes:
                states[fqn] = dict(wholes)
            parts: Sequence[LocalPart] | None = None  # boxes of states that are placed alike
            place = _placement(parameter)
            for name, entry in wanted.items():
                shards = plan.shards.get(fqn, ())
                if wholes and outer_name(name, wholes) in wholes:
                    whole = live[name] if (fqn, name) in plan.joined else as_global(entry.name, live[name], shards)
                    self._read(whole, entry, beside=self._atomic)
                    continue
                shards = shards if entry.numel > 1 else ()
                held, order = None, None
                if plan.held or plan.orders:
                    saved_as = f"{plan.key}.state.{fqn}.{name}"
                    held, order = plan.held.get(saved_as), plan.orders.get(saved_as)
                kept: Any = live.get(name)
                dtype = plan.casts.get((fqn, name)) or getattr(torch, entry.dtype)
                shape = tuple(parameter.shape) if shards else entry.shape
                alike = self._has_form(kept, entry, dtype, shape, parameter, place, held, order)
                if alike and self._stays(kept):
                    local, found = without_subclass(local_part(kept)).detach(), parts
                    special = self._shares(kept) or is_paged(kept)
                    if found is None or special:
                        placed = parameter if held == SHARD else as_global(entry.name, kept, shards)
                        _, found = parts_here(placed, local)
                        parts = parts if special else found
                    self._fill(local, entry, found, beside=self._atomic)
                    states[fqn][name] = kept
                    continue
                new = None if order else new_paged(plan.optimizer, parameter, name, dtype, shape)
                if new is None:
                    new = new_state_tensor(parameter, name, dtype, shape, on_device=on_device[id(parameter)], held=held)
                if order is not None and type(new) is torch.Tensor and new.dim() == len(order):
                    new = in_order(new, order)
                if type(new) is torch.Tensor and not (alike or shards or held or new.is_meta):  # such as a step count
                    self.filler.add(entry, Box.whole(entry.shape), new)
                    states[fqn][name] = new
                    continue
                view = self._read(as_global(entry.name, new, shards), entry)
                self.held += view.local.nbytes if alike else 0
                states[fqn][name] = view.local if held == SHARD else new
        return states

    def _has_form(
        self,
        kept: Any,
        entry: TensorEntry,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        parameter: torch.Tensor,
        place: tuple[Any, ...],
        held: Held | None,
        order: list[int] | None,
    ) -> bool:
        """Return whether the load can fill a live state in place.

        This is possible if a new state would have the same dtype, shape, placement and memory order. Returns False for
        a state with one element, because such a state may have been saved from another device. If a state shares memory
        with other states, its shape may differ from the parameter's.

        Args:
            dtype, shape: Those of the state after the load.
            place: The placement of the parameter; see `_placement`.
            held, order: The form in which the state was saved; see `OptimizerTree`.
        """
        import torch
        from torch.distributed.tensor import DTensor

        if type(kept) not in (torch.Tensor, DTensor) or kept.dtype is not dtype:
            return False
        if kept.is_meta or kept.requires_grad or id(kept) in self._apart:
            return False
        if type(kept) is torch.Tensor and self._shares(kept):
            here = tuple(local_part(parameter).shape) if held == SHARD else shape
            alike = held in (None, PLAIN, SHARD) and memory_order(kept, parameter) == order
            return alike and tuple(kept.shape) == here
        if held is not None or order is not None:
            return False
        if is_paged(kept):
            return tuple(kept.shape) == shape
        return entry.numel > 1 and place[0] == shape and _placement(kept) == place

    def _shares(self, kept: torch.Tensor) -> bool:
        """Return whether a live state shares memory with the same states as in the checkpoint."""
        return id(kept) in self._joint

    def _stays(self, kept: torch.Tensor) -> bool:
        """Return whether to fill a live state's own tensor, instead of replacing it with a new tensor.

        Without `atomic`, always returns True. With `atomic`, returns True for a tensor on an accelerator, where a
        second tensor rarely fits, for a paged tensor, and for a tensor that shares memory with others.
        """
        return not self._atomic or kept.device.type != "cpu" or self._shares(kept) or is_paged(kept) or _is_view(kept)

    def _references(self, plan: LoadPlan) -> dict[str, torch.Tensor]:
        """Schedule reads of the tensors that objects refer to, and return these tensors by key.

        For example, a large tensor in a scheduler's state is stored outside the scheduler's object.

        A tensor gets the placement of the live tensor with the same key. If there is no such live tensor, each rank
        reads the whole tensor.
        """
        import torch
        from torch.distributed.tensor import DTensor

        wanted = plan.references()
        refs = {key: plan.tensors[key] for key in wanted if key in plan.tensors}
        wanted = [key for key in wanted if key not in refs]
        if not wanted:
            return refs
        live = _live_references(plan)
        for key in wanted:
            entry, template = plan.catalog.tensors.get(key), live.get(key)
            if entry is None or not isinstance(template, DTensor) or tuple(template.shape) != entry.shape:
                refs[key] = (self.first or self.filler).add_whole(plan.catalog, key)
                continue
            refs[key] = torch.empty_like(template, dtype=getattr(torch, entry.dtype), requires_grad=False)
            self._read(refs[key], entry)
        return refs

    def _check_memory(self, limit: int | None) -> None:
        """Raise LoadError if the second copy of the state (see `Reading`) exceeds `limit`.

        None: the limit is this rank's share of free memory.
        """
        ranks_here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
        free = free_memory() if limit is None else None
        most = limit if free is None else free // ranks_here
        if most is not None and self.held > most:
            why = "max_memory allows" if limit is not None else "this rank's share of the free memory is"
            other = ", or raise max_memory" if limit is not None else ""
            raise LoadError(
                f"atomic=True needs {format_size(self.held)} in addition to this rank's state, but {why} "
                f"{format_size(most)}; nothing was loaded. Load without atomic=True, which needs no second copy{other}."
            )


def _live_references(plan: LoadPlan) -> dict[str, torch.Tensor]:
    """Return a template for each tensor that an object refers to, under the tensor's key.

    A template has the shape and placement that the load reads. For `extra`, the templates are the live tensors. For
    DTensors that optimizers keep in lists and dicts, the templates are new, uninitialized tensors.
    """
    import torch

    live: dict[str, torch.Tensor] = {}
    for target in plan.objects:
        item = target.item
        if target.kind == "extra" and not isinstance(item, PerRank):
            # The live value may be anything, even a value that cannot be saved.
            with contextlib.suppress(SaveError):
                encode(item.state_dict() if is_stateful(item) else item, target.key, live)
    for optimizer in plan.optimizers:
        owned = [
            ([optimizer.parameters[f]], trees) for f, trees in optimizer.values.items() if f in optimizer.parameters
        ]
        for parameters, trees in (
            [*owned, ([*optimizer.parameters.values()], optimizer.shared)] if optimizer.held else ()
        ):
            for key in references(trees):
                entry = plan.catalog.tensors.get(key)
                if entry is not None:
                    dtype, held = getattr(torch, entry.dtype), optimizer.held.get(key)
                    made = held_by_any(parameters, held, dtype, entry.shape)
                    live.update({} if made is None else {key: made})
    return live


def _placement(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the properties of a parameter that a new optimizer state copies: shape, device or mesh, memory order."""
    from torch.distributed.tensor import DTensor

    local, placed = local_part(tensor), None
    if isinstance(tensor, DTensor):
        placed = tensor.device_mesh, tensor.placements
    return tuple(tensor.shape), placed, tensor.device, local.stride() if local.numel() else None


def _is_view(tensor: torch.Tensor) -> bool:
    local = local_part(tensor)
    return local.untyped_storage().nbytes() > local.nbytes


def _overlaps(plan: LoadPlan, models: Sequence[PartView], store: Store) -> tuple[set[int], set[int]]:
    """Return two sets of ids of live optimizer states that share memory with other tensors.

    The first set contains the states that shared memory in the same way when they were saved. A load fills them in
    place, so that they continue to share memory. The second set contains all others. A load gives each of them its own
    memory.

    Args:
        models: This rank's parts of the tensors in `plan.models`.
    """
    fqns = {id(target.live): target.entry.fqn or "" for target in plan.models}
    fqns.update((id(parameter), fqn) for one in plan.optimizers for fqn, parameter in one.parameters.items())
    weights = {id(target.live): target.live for target in plan.models}
    weights.update((id(item), item) for one in plan.optimizers for item in one.parameters.values())
    members: list[tuple[OptimizerPlan | None, View, Any]]
    members = [(None, (fqns.get(key, ""), ""), tensor) for key, tensor in weights.items()]
    for one in plan.optimizers:
        members += [(one, (fqn, name), item) for fqn, states in one.live.items() for name, item in states.items()]
        for index, group in enumerate(one.optimizer.param_groups):
            members += [(None, ("", f"param_groups.{index}.{key}"), item) for key, item in group.items()]
    found = [(local, member) for member in members if (local := in_one_memory(member[-1])) is not None]
    joint, apart = set[int](), set[int]()
    for one in plan.optimizers:
        memory = memories(one.optimizer, plan.weights(one)) if one.views else {}
        for group in one.views:
            counts = Counter(memory[view] for view in group if view in memory)
            views = [view for view in group if view in memory and counts[memory[view]] > 1 and view[0] in one.live]
            joint.update(id(one.live[fqn][name]) for fqn, name in views if name in one.live[fqn])
    for rows in overlapping([local for local, _ in found]):
        group = [found[row][1] for row in rows]
        states = {id(tensor) for one, _, tensor in group if one is not None}
        if states and _shared_when_saved(plan, [view for _, view, _ in group]):
            known = {
                id(target.live): view.claim(target.entry) for target, view in zip(plan.models, models, strict=True)
            }
            claims = [
                known.get(id(tensor)) if one is None else _claim(one, view, tensor)
                for one, view, tensor in group
                if not view[1].startswith("param_groups.")  # filled in place, like any other tensor in a group
            ]
            (joint if are_one(store, claims) else apart).update(states)
        else:
            apart.update(states)
    return joint - apart, apart


def _shared_when_saved(plan: LoadPlan, views: Sequence[View]) -> bool:
    first = {(fqn, name): (other, of) for one in plan.optimizers for fqn, name, other, of in one.same}
    wanted = {first.get(view, view) for view in views}
    return len(wanted) == 1 or any(wanted <= set(group) for one in plan.optimizers for group in one.views)


def _claim(plan: OptimizerPlan, view: View, tensor: torch.Tensor) -> Claim | None:
    """Return the `Claim` for loading the optimizer state `view` (FQN, name) into `tensor`, or None if it is skipped."""
    fqn, name = view
    entry = plan.masters.get(fqn) if name == plan.master_name else plan.states.get(fqn, {}).get(name)
    if entry is None or plan.skip:
        return None
    shards = plan.shards.get(fqn, ()) if entry.numel > 1 else ()
    return part_view(entry.name, as_global(entry.name, tensor, shards)).claim(entry)


# --- free memory


def free_memory() -> int | None:
    """Return the free memory in bytes, within the container's limits. Returns None on systems other than Linux."""
    found = [int(value.split()[0]) << 10 for key, value in _table("/proc/meminfo", ":") if key == "MemAvailable"]
    for line in _text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, limit, used, cache = "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, used = "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        here = Path(top, path.lstrip("/"))
        for folder in dict.fromkeys([here, *here.parents, Path(top)]):
            most, now = _text(folder / limit).strip(), _text(folder / used).strip()
            if folder.is_relative_to(top) and most.isdigit() and now.isdigit():
                # The kernel releases file caches on demand, so they count as free.
                files = sum(int(value) for key, value in _table(folder / "memory.stat", " ") if key == cache)
                found.append(int(most) - int(now) + files)
    return max(0, min(found)) if found else None


def _table(path: str | Path, separator: str) -> Iterator[tuple[str, Any]]:
    for line in _text(path).splitlines():
        key, _, value = line.partition(separator)
        yield key, value


def _text(path: str | Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return Path(path).read_text(encoding="utf-8")
    return ""
