"""Calls a function as soon as a module has been imported. This module does not import PyTorch."""

import sys


class AfterImport:
    """A finder that calls a function after a module has been imported for the first time.

    Merely looking up a module, as `importlib.util.find_spec` does, does not call the function.
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
        """Make a loader call the function as soon as it has run the module."""
        execute = loader.exec_module

        def exec_module(module):
            execute(module)
            if self in sys.meta_path:  # several lookups may have changed several loaders
                sys.meta_path.remove(self)
                self.function()

        loader.exec_module = exec_module


def after_import(name, function):
    """Call a function once a module has been imported, which may already be the case."""
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, AfterImport(name, function))
