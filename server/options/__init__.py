"""The options of `gangway serve`, spelled as tritonserver spells them wherever it has them.

One module per group of flags. Each has a frozen dataclass of its values with the defaults (sizes, times and units
stand in its docstring), `add_flags(parser)`, which defines the flags, and `read(arguments)`, which makes the
dataclass of what argparse found. `read` raises OptionError if flags do not fit together; what is wrong with one flag
is said by its type (`values.py`). A group is known by its line in `command_line.GROUPS` and its field in
`serve_options.ServeOptions`. The whole of ServeOptions reaches the front-end process (`front_end_options.py`), so
nothing else needs to be told. That process imports no `command_line`.
"""
