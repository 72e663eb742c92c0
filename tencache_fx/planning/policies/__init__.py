"""How a policy chooses transfers: one file each."""
