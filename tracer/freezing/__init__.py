"""From a trace to a freeze plan: which blocks continued pre-training trains, and which it leaves as they are."""
