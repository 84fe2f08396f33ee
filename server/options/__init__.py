"""The options of `gangway serve`, spelled as tritonserver spells them wherever it has them.

Each group of flags has a frozen dataclass of its values with the defaults; its docstring has sizes, times and units. It
also has a FlagGroup, which `command_line.GROUPS` names by its field in ServeOptions. The whole of ServeOptions reaches
the front-end process (`FrontEndOptions`), so nothing else needs to be told.
"""
