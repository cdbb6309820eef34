"""The unpickler runs no code for any opcode; each refusal has a harmless variant that is accepted."""

import gc
import pickle
import struct
from typing import Any

import pytest

from ckptkit.errors import CorruptCheckpointError, UnsafePickleError
from ckptkit.formats.pickles.inert import Record
from ckptkit.formats.pickles.walk import loads
from tests.formats.pickles.reference import described

P = b"\x80\x04"


def text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def stack_global(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def line_global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path, monkeypatch):
    """Payloads create a directory PWNED in the working directory."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.iterdir())


ARGS = text("PWNED") + b"\x85"
ORDERED = stack_global("collections", "OrderedDict")

# Each way to call a global: hostile with os.mkdir, harmless with an allowed class.
CALLS: dict[str, Any] = {
    "REDUCE of GLOBAL": lambda g, a: line_global(*g) + a + b"R.",
    "REDUCE of STACK_GLOBAL": lambda g, a: P + stack_global(*g) + a + b"R.",
    "NEWOBJ": lambda g, a: P + stack_global(*g) + a + b"\x81.",
    "NEWOBJ_EX": lambda g, a: P + stack_global(*g) + a + b"}\x92.",
    "INST": lambda g, a: b"(" + a[:-1] + f"i{g[0]}\n{g[1]}\n.".encode(),
    "OBJ": lambda g, a: b"(" + line_global(*g) + a[:-1] + b"o.",
    "nested in the arguments of an allowed call": lambda g, a: (
        P + stack_global("builtins", "list") + b"]" + stack_global(*g) + a + b"Ra\x85R."
    ),
    "in a state": lambda g, a: P + stack_global("argparse", "Namespace") + b")\x81}" + text("x") + stack_global(*g) + a
    + b"Rsb.",
    "as a dict's value": lambda g, a: P + b"}K\x01" + stack_global(*g) + a + b"Rs.",
    "behind a memo": lambda g, a: P + stack_global(*g) + b"\x940h\x00" + a + b"R.",
    "popped again": lambda g, a: P + stack_global(*g) + a + b"R0N.",
}  # fmt: skip


@pytest.mark.parametrize("how", CALLS)
def test_an_opcode_calls_only_globals_that_are_allowed(how):
    for module in ("posix", "os"):
        with pytest.raises(UnsafePickleError, match=rf"file\.pt: its pickle asks for '{module}\.mkdir'"):
            loads(CALLS[how]((module, "mkdir"), ARGS), file="file.pt")
    loads(CALLS[how](("pathlib", "PurePosixPath"), ARGS), file="f")


# Builtins, modules that run code, neighbours of allowed names, and names that look like others.
GLOBALS = (
    "builtins.eval", "builtins.__import__", "builtins.setattr", "builtins.type", "__builtin__.apply", "nt.system",
    "posix.system", "subprocess.Popen", "importlib.import_module", "operator.attrgetter", "functools.partial",
    "pickle.loads", "torch.load", "torch.save", "torch.storage._load_from_bytes",
    "torch._utils._import_dotted_name", "torch.distributed.checkpoint.format_utils.dcp_to_torch_save",
    "torch.nn.modules.linear.Linear", "torch.distributed._shard.sharded_tensor.api.os",
    "torch.distributed.device_mesh.init_device_mesh", "torch.distributed.tensor.os.system", "numpy.load",
    "numpy.core.multiarray.fromfile", "pathlib.Path.touch", "collections.OrderedDict.fromkeys",
    "collections.namedtuple", "_codecs.decode", "copyreg.add_extension", "copyreg.__newobj__", "datetime.datetime.now",
    "megatron.core.utils.run", "deepspeed.runtime.config.Config", "оs.system", "os .system", "OS.system", ".system",
    "os.",
)  # fmt: skip


@pytest.mark.parametrize("name", GLOBALS)
def test_a_global_that_is_not_allowed_is_refused_by_name(name):
    module, _, attribute = name.rpartition(".")
    for data in (P + stack_global(module, attribute) + b".", P + b"]" + stack_global(module, attribute) + b"a."):
        with pytest.raises(UnsafePickleError) as caught:
            loads(data, file="f")
        assert repr(name) in str(caught.value)


def test_a_dotted_name_does_not_bypass_the_check():
    with pytest.raises(UnsafePickleError, match=r"collections\.OrderedDict\.__init__\.__globals__"):
        loads(P + stack_global("collections", "OrderedDict.__init__.__globals__") + b".", file="f")


def getattr_of(*names: str) -> bytes:
    made = stack_global("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
    for name in names:
        made = stack_global("builtins", "getattr") + made + text(name) + b"\x86R"
    return P + made + b"."


def test_getattr_in_a_pickle_may_return_a_nested_class_of_torch_distributed():
    found = loads(getattr_of("ProcessGroupState"), file="f")
    assert issubclass(found, Record)
    assert found.kind.endswith(".ShardedTensor.ProcessGroupState")


@pytest.mark.parametrize("data", [
    *map(getattr_of, ("__init__", "__subclasses__", "kind", "a b")), getattr_of("__class__", "__base__"),
    *(P + stack_global("builtins", "getattr") + no_class + text("X") + b"\x86R."
      for no_class in (text("x"), ORDERED, b"K\x01", b"]")),
])  # fmt: skip
def test_getattr_in_a_pickle_may_not_return_anything_else(data):
    with pytest.raises((UnsafePickleError, CorruptCheckpointError)):
        loads(data, file="f")


# --- stubs cannot be turned into anything else

RECORD = stack_global("argparse", "Namespace")
BUILDS = {
    "a state named __setstate__": RECORD + b")\x81}" + text("__setstate__") + text("x") + b"sb",
    "a state named __class__": RECORD + b")\x81}" + text("__class__") + text("x") + b"sb",
    "a state of slots": RECORD + b")\x81N}" + text("args") + text("x") + b"s\x86b",
}


@pytest.mark.parametrize("what", BUILDS)
def test_a_state_set_by_a_pickle_is_only_data(what):
    made = loads(P + BUILDS[what] + b".", file="f")
    assert type(made).__name__ == "Record"
    assert made.args == ()


NO_STATE = {
    "a class": RECORD, "a function": ORDERED, "a list": b"]", "text": text("x"),
    "a dtype": stack_global("torch", "float32"), "a storage class": stack_global("torch", "FloatStorage"),
    "a tuple class": stack_global("torch", "Size"),
}  # fmt: skip


@pytest.mark.parametrize("what", NO_STATE)
def test_a_pickle_may_not_set_the_state_of_shared_values(what):
    for state in (b"}" + text("_call") + b"Ns", b"N}" + text("_call") + b"Ns\x86", b"N"):
        with pytest.raises(CorruptCheckpointError):
            loads(P + NO_STATE[what] + state + b"b.", file="f")
    assert loads(P + ORDERED + b")R.", file="f") == {}


@pytest.mark.parametrize("callee", [b"K\x01", b"N", text("x"), b"]", b")", RECORD + b")\x81", b"}"])
def test_only_allowed_globals_are_called(callee):
    for call in (b")R.", b")\x81.", b")}\x92."):
        with pytest.raises(CorruptCheckpointError):
            loads(P + callee + call, file="f")


# --- malformed and exhausting pickles: (hostile, harmless variant)

DEEP = b"N" + b"\x85" * 200_000
DAG = b"N\x85" + b"2\x86" * 64
PAIRS: dict[str, tuple[bytes, ...]] = {
    "a global named by numbers": (P + b"K\x01K\x02\x93.", P + b"K\x01K\x02\x86."),
    "a global named by bytes": (P + b"C\x02osC\x06system\x93.", P + b"C\x02osC\x06system\x86."),
    "EXT1": (P + b"\x82\x01.", P + b"K\x01."),
    "EXT2": (P + b"\x83\x01\x00.", P + b"M\x01\x00."),
    "EXT4": (P + b"\x84\x01\x00\x00\x00.", P + b"J\x01\x00\x00\x00."),
    "a persistent id in text": (b"Pos.system\n.", b"Vos.system\n."),
    "a persistent id": (P + text("os") + b"Q.", P + text("os") + b"."),
    "a buffer from outside": (P + b"\x97.", P + b"N."),
    "a read-only buffer": (P + b"N\x98.", P + b"N."),
    "a newer protocol": (b"\x80\x06N.", b"\x80\x05N."),
    "an integer of a gigabyte": (P + b"\x8b\x00\x00\x00\x40.", P + b"\x8b\x01\x00\x00\x00\x05."),
    "an integer of a million bytes": (P + b"\x8b\x40\x42\x0f\x00" + b"\x7f" * 1_000_000 + b".", P + b"\x8a\x01\x05."),
    "an integer of a million digits": (b"L" + b"9" * 1_000_000 + b"L\n.", b"L" + b"9" * 600 + b"L\n."),
    "text of an exabyte": (P + b"\x8d" + b"\xff" * 7 + b"\x0fx.", P + b"\x8d\x01" + bytes(7) + b"x."),
    "bytes of an exabyte": (P + b"\x8e" + b"\xff" * 7 + b"\x0fx.", P + b"\x8e\x01" + bytes(7) + b"x."),
    "a bytearray of an exabyte": (P + b"\x96" + b"\xff" * 7 + b"\x0fx.", P + b"\x96\x01" + bytes(7) + b"x."),
    **{f"{kind} by number": tuple(P + stack_global("builtins", kind) + argument + b"\x85R." for argument in arguments)
       for kind, arguments in {"bytearray": (b"J\xff\xff\xff\x7f", b"C\x01x"),
                               "bytes": (b"J\xff\xff\xff\x7f", b"]K\x07a")}.items()},
    "a frame past the end": (P + b"\x95" + b"\xff" * 8 + b"N.", P + b"\x95\x02" + bytes(7) + b"N."),
    "a memo index of two billion": (P + b"]r\xff\xff\xff\x7f.", P + b"]r\x01\x00\x00\x00."),
    "a memo index in text": (b"(lp99999999999\n.", b"(lp1\n."),
    "a memo index that is not there": (P + b"h\x05.", P + b"N\x940h\x00."),
    "a memo index that was left out": (P + b"Nq\x05h\x04.", P + b"Nq\x05h\x05."),
    "a wide memo index that was left out": (P + b"Nq\x05j\x04\0\0\0.", P + b"Nq\x05j\x05\0\0\0."),
    "a memo index below nothing": (b"Np5\ng-1\n.", b"Np5\ng5\n."),
    "a key nested too deeply to hash": (P + b"}" + DEEP + b"Ns.", P + DEEP[:60] + b"."),
    "a key that takes for ever to hash": (P + b"}" + DAG + b"Ns.", P + b"}N\x85\x85Ns."),
    "a member of a set that takes for ever": (P + b"\x8f(" + DAG + b"\x90.", P + b"\x8f(N\x85\x90."),
    "a frozenset that takes for ever": (P + b"(" + DAG + b"\x91.", P + b"(N\x85\x91."),
    "a pair of an OrderedDict that takes for ever": (
        P + ORDERED + b"](" + DAG + b"Nt\x61\x85R.", P + ORDERED + b"](K\x01Nt\x61\x85R."),
    "a key that collides": (P + b"}\x8a\x09" + b"\xff" * 8 + b"\x1fNs.", P + b"}\x8a\x07" + b"\xff" * 6 + b"\x1fNs."),
    "a list as a key": (P + b"}]Ns.", P + b"})Ns."),
    "items of a list": (P + b"]K\x01K\x02s.", P + b"}K\x01K\x02s."),
    "an odd number of items": (P + b"}(K\x01u.", P + b"}(K\x01K\x02u."),
    "appending to a tuple": (P + b")K\x01a.", P + b"]K\x01a."),
    "adding to a list": (P + b"](K\x01\x90.", P + b"\x8f(K\x01\x90."),
    "an empty stack": (P + b".", P + b"N."),
    "too few for a tuple": (P + b"N\x87.", P + b"NNN\x87."),
    "below the mark": (P + b"N(\x85.", P + b"(N\x85t."),
    "no mark": (P + b"Nt.", P + b"(Nt."),
    "no end": (P + b"N", P + b"N."),
    "nothing": (b"", P + b"N."),
    "an unknown opcode": (P + b"\xff.", P + b"N."),
    "a line without end": (b"Vabc", b"Vabc\n."),
    "a string with escapes": (b"S'\\x41'\n.", b"S'A'\n."),
    "a string without quotes": (b"Sabc\n.", b"S'abc'\n."),
    "a text that is no float": (b"Fabc\n.", b"F1.5\n."),
    "text that is not UTF-8": (P + b"X\x01\x00\x00\x00\xff.", P + b"X\x01\x00\x00\x00a."),
    "keywords that are not text": (P + RECORD + b")}K\x01Ns\x92.", P + RECORD + b")}" + text("k") + b"Ns\x92."),
    **{what: tuple(P + stack_global(*function) + arguments for arguments in both) for what, function, both in (
        ("a codec that runs", ("_codecs", "encode"),
         (text("x") + text("zip") + b"\x86R.", text("x") + text("latin1") + b"\x86R.")),
        ("complex of an object", ("builtins", "complex"), (RECORD + b")\x81\x85R.", b"K\x01\x85R.")),
        ("a class that is not a record", ("copyreg", "_reconstructor"), (b"NNN\x87R.", RECORD + b"NN\x87R.")))},
}  # fmt: skip


@pytest.mark.parametrize("what", PAIRS)
def test_pickles_that_no_pickler_writes_are_refused(what):
    hostile, benign = PAIRS[what]
    with pytest.raises((CorruptCheckpointError, UnsafePickleError), match="f: "):
        loads(hostile, file="f")
    loads(benign, file="f")


# --- values that picklers do write are restored

VALUES: list[Any] = [
    None, True, False, 0, 1, 255, 256, 65535, 65536, -1, 1 << 31, -(1 << 31), 1 << 70, -(1 << 70), 1.5, float("inf"),
    "", "x", "é\ud800", "x" * 300, b"", b"x" * 300, bytearray(b"y"), (),
    (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], [1, 2],
    {}, {"a": 1, (1, "b"): 2}, set(), {1, 2}, frozenset(), frozenset("ab"), [[[[]]]], {"s": [1] * 2000},
]  # fmt: skip


@pytest.mark.parametrize("protocol", range(6))
def test_plain_pickled_values_are_read_correctly_and_shared_and_recursive_ones_keep_their_identity(protocol):
    for value in VALUES:
        found = loads(pickle.dumps(value, protocol), file="f")
        assert found == value and type(found) is type(value)
    shared: list[Any] = [1]
    circle: list[Any] = [shared, shared]
    circle.append(circle)
    found = loads(pickle.dumps(circle, protocol), file="f")
    assert found[0] is found[1] and found[2] is found


def test_classes_under_old_module_names_are_read(zoo):
    data = (zoo / "dcp_dtensor_2d/ckpt/.metadata").read_bytes()
    old = b"torch.distributed._shard.checkpoint.metadata"
    new = b"torch.distributed.checkpoint.metadata"
    moved = data.replace(b"\x8c" + bytes([len(new)]) + new, b"\x8c" + bytes([len(old)]) + old)
    moved = b"\x80\x04" + moved[11:]  # without the frame, whose length no longer fits
    assert moved != data
    assert described(loads(moved, file="m")) == described(loads(data, file="m"))


def test_garbage_collection_is_on_again_after_an_error():
    with pytest.raises(CorruptCheckpointError):
        loads(b"\x80\x04" + b"N" * 64 + b"R.", file="m")
    assert gc.isenabled()


@pytest.mark.parametrize("many", [b"]", b"}", b"\x8f", b"]\x94", b"N\x85", b"N\x85\x85\x85", b"(t"])
def test_oversized_containers_are_refused(many):
    count = 2_400_000 // len(many)
    with pytest.raises(CorruptCheckpointError, match="too many empty containers for its size"):
        loads(b"\x80\x04" + many * count + b".", file="m")
    loads(b"\x80\x04" + many * 1000 + b".", file="m")


def test_an_oversized_pickle_is_refused_before_it_is_read(monkeypatch):
    from ckptkit.formats.pickles import walk

    monkeypatch.setattr(walk, "MAX_PICKLE_BYTES", 10)
    with pytest.raises(CorruptCheckpointError, match="larger than any"):
        loads(pickle.dumps("x" * 20), file="f")
