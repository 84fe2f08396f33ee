"""The options of `gangway serve`, spelled as tritonserver spells them wherever it has them.

Each group of flags has a frozen dataclass of its values; its docstring has sizes, times and units. A field that is the
value of one flag says all of it (`values.flag`), in the order of the help. Others are read from several flags by the
group's FlagGroup, which `command_line.GROUPS` names by its field in ServeOptions. The whole of ServeOptions reaches the
front-end process (`FrontEndOptions`), so nothing else needs to be told.
"""
