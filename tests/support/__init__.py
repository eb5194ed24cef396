"""What several tests share and no single one owns."""
