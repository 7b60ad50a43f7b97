"""Pure decisions and layouts; standard library, msgspec and numpy only."""
