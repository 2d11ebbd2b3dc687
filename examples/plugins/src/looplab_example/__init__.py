"""Examples of looplab plug-ins."""
