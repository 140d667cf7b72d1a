from millstream.cli import main

main()
