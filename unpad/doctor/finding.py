"""Findings of the doctor."""

from unpad.terminal.finding import SEVERITIES as SEVERITIES
from unpad.terminal.finding import Finding as Finding
from unpad.terminal.finding import Severity as Severity
from unpad.terminal.finding import Value as Value
from unpad.terminal.finding import ranked as ranked
