"""Two Faust apps: control (signals to weights) and ledger (usage to rated lines)."""
