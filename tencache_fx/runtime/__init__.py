"""What runs the plan: pinned buffers, copy lanes, the spill store, and the engine that owns them."""
