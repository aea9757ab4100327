"""Which software this is: what every node says when it joins, and what the wheel is called."""

VERSION = "0.1.0"
