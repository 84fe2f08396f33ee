"""The options of `gangway serve`, spelled as tritonserver spells them wherever it has them.

Each group of flags has a frozen dataclass of its values; its docstring has sizes, times and units. A field says all of
its flag (`base/flags.py`), in the order of the help. The whole of ServeOptions reaches the front-end process
(`FrontEndOptions`), so nothing else needs to be told.
"""
