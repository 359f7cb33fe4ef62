"""Calls a function as soon as a module has been imported. Does not import PyTorch."""

import sys


class AfterImport:
    """A finder that calls a function after a module has been imported for the first time.

    To look a module up, as `importlib.util.find_spec` does, is no import, and changes nothing.
    """

    def __init__(self, name, function):
        self.name, self.function = name, function

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec and spec.loader:
            self.call_after(spec.loader)
        return spec

    def call_after(self, loader):
        """Let the loader that a lookup has found call the function once the module is executed."""
        execute = loader.exec_module

        def exec_module(module):
            execute(module)
            if self in sys.meta_path:  # find_spec() and an import give two loaders: call it once
                sys.meta_path.remove(self)
                self.function()

        loader.exec_module = exec_module


def after_import(name, function):
    """Call a function when a module has been imported, at once if it has been already."""
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, AfterImport(name, function))
