"""What the package says while it runs: errors, warnings and log lines, and the text of every error and warning.

An **error** is raised when a call cannot do what it was asked; `converter.ConverterError` is the root of the tree.

A **warning** is for a call that works but can be mended now, whatever the rows, the machine and the number of
processes are. Every warning is a `converter.ConverterWarning`, so one filter holds for all:
`warnings.filterwarnings("error", category=converter.ConverterWarning)`.

A **log line** is for all that depends on the rows, the machine, the store or other processes. There is one logger,
`converter`, with a child for each module:

>>> import logging
>>> logging.getLogger("converter").handlers
[]

| level | what it says | such as |
|---|---|---|
| `DEBUG` | something was tried in vain; another way has the same result | `Spark keeps … as it is: …` |
| `INFO` | a decision that may be questioned: what was reused or rounded | `Column 'x': double becomes float32.` |
| `WARNING` | something is lost, or was not done as asked | `Column 'x': 3 of 80 rows … are left out. …` |
| `ERROR` | nothing: an error is raised, and the program decides what to log | |

Only Petastorm's loaders in `converter.petastorm` log an error that they also raise, as they did there.

No import configures logging, and there is no `NullHandler`: if a program configures none, Python prints the lines of
level `WARNING` to stderr, because rows must not be left out silently.
`logging.getLogger("converter").setLevel("ERROR")` hides them. No line holds a secret. What runs on Spark's executors
logs nothing: it reports to the driver, which logs it.

Records have plain text and no attributes of their own, so OpenTelemetry takes them as they are, by the
`LoggingHandler` of `opentelemetry-instrumentation-logging`:
`logging.getLogger("converter").addHandler(LoggingHandler(logger_provider=provider))`. The scope of each record is its
module.

## Every error and warning

.. include:: messages.md
"""
