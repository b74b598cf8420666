"""Stand-ins that let SGLang 0.5.23 start on a machine without CUDA packages.

SGLang imports `sgl_kernel`, `torchvision` and `triton` at module level even when it then runs every operator
through its plain PyTorch path (`forward_native`). Here those three names resolve to empty modules. Nothing of
SGLang is edited: the HTTP layer, tokenizer manager, scheduler, radix cache, sampler and detokenizer are its own
code. A stubbed `sgl_kernel` or `torchvision` function or class that is really called raises, so a missing
kernel is an error and never a wrong number.

install.sh copies this file into site-packages next to a .pth file that imports it, so that every Python
process of the environment (SGLang spawns several) has it before SGLang is imported.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types

STRICT = set(filter(None, os.environ.get("SGLANG_CPU_STUBS", "torchvision,sgl_kernel").split(",")))


def _top(name):
    return name.split(".")[0]


def _callers():
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _is_decorator_use(args, kwargs):
    return len(args) == 1 and callable(args[0]) and not kwargs


# --- sgl_kernel, torchvision: may be imported and used as decorators, never called --------------------------


class _StubClass:
    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__()

    def __init__(self, *args, **kwargs):
        raise RuntimeError("stubbed-out class used: %r" % type(self))


class _StubObject:
    def __init__(self, full):
        self.__dict__["_full"] = full
        self.__name__ = full.rsplit(".", 1)[-1]

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _StubObject(self._full + "." + name)

    def __call__(self, *args, **kwargs):
        if _is_decorator_use(args, kwargs):
            return args[0]
        raise RuntimeError("stubbed-out function called: " + self._full)


class _StubModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        full = self.__name__ + "." + name
        if full in sys.modules:
            return sys.modules[full]
        value = type(name, (_StubClass,), {}) if name[:1].isupper() else _StubObject(full)
        setattr(self, name, value)
        return value


class _StrictFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if _top(name) not in STRICT:
            return None
        # transformers probes for optional packages: let it see that torchvision is absent.
        for code in _callers():
            if (
                code.co_filename.endswith("transformers/utils/import_utils.py")
                and code.co_name == "_is_package_available"
            ):
                return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = _StubModule(spec.name)
        module.__path__ = []
        module.__version__ = "0.0.0"
        return module

    def exec_module(self, module):
        pass


# --- triton: about 1 GB installed, and the CPU path never launches a kernel: decorators pass through ---------


class _TritonModule(types.ModuleType):
    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []
        self.__version__ = "3.4.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        full = self.__name__ + "." + name
        if full in sys.modules:
            return sys.modules[full]
        if name[:1].isupper():
            value = type(
                name,
                (object,),
                {"__init__": lambda self, *a, **k: None, "__class_getitem__": classmethod(lambda cls, item: cls)},
            )
        else:
            value = _TritonModule(full)
        self.__dict__[name] = value
        return value

    def __call__(self, *args, **kwargs):
        if _is_decorator_use(args, kwargs):
            return args[0]
        return lambda function: function


class _TritonFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    torch_has_looked = False

    def find_spec(self, name, path=None, target=None):
        if _top(name) != "triton":
            return None
        # torch and the import probes must keep seeing the truth: there is no triton.
        for code in _callers():
            if "/torch/" in code.co_filename or "import_utils" in code.co_filename:
                return None
        if name == "triton" and not self.torch_has_looked:
            self.torch_has_looked = True
            # torch caches its own answer on first import of these modules: make it conclude "no triton" first.
            import torch._inductor.utils, torch._inductor.runtime.hints  # noqa: E401,F401
            import torch._inductor.runtime.triton_compat, torch._inductor.runtime.autotune_cache  # noqa: E401,F401
            import torch._inductor.async_compile, torch._inductor.standalone_compile  # noqa: E401,F401
            import torch._inductor.compile_fx  # noqa: F401
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _TritonModule(spec.name)

    def exec_module(self, module):
        pass


# Appended, not prepended: a really installed package always wins over its stand-in.
sys.meta_path.append(_StrictFinder())
sys.meta_path.append(_TritonFinder())
