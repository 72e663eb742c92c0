"""The machine: capacities, rates, timings, and what is measured of them."""
