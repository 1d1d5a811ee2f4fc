"""The pure core of Callforest: custody, lineage and forests, without clocks, storage or sockets."""
