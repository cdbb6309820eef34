"""Pictures of checkpoints: one self-contained HTML page, inline SVG, no network. Every name is escaped."""
