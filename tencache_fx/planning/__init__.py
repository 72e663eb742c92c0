"""The planner: a problem in, a plan out, on plain values. No torch here."""
