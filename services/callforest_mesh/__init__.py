"""The Callforest services, one package each, and the chassis they stand on."""
