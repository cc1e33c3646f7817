// What QEMU's firmware lacks, and a host has: two frequencies of CPU 0 (_PSS), and of both CPUs an idle state that is left
// late (_CST). The state is of the type C1 and halts: in a deeper one the kernel gives up the TSC as a clock.
DefinitionBlock ("", "SSDT", 1, "PAGEFD", "CPUPM", 1)
{
  External (\_SB.CPUS.C000, DeviceObj)
  External (\_SB.CPUS.C001, DeviceObj)
  Scope (\_SB.CPUS.C000) {
    Name (_CST, Package () { 2,
      Package () { ResourceTemplate () { Register (FFixedHW, 0, 0, 0) }, 1, 1, 1000 },
      Package () { ResourceTemplate () { Register (FFixedHW, 0, 0, 0) }, 1, 890, 100 } })
    // A port that no device has takes the frequency.
    Name (_PCT, Package () {
      ResourceTemplate () { Register (SystemIO, 8, 0, 0x1001) },
      ResourceTemplate () { Register (SystemIO, 8, 0, 0x1001) } })
    Name (_PSS, Package () { Package () { 2000, 1000, 10, 10, 0, 0 }, Package () { 1000, 500, 10, 10, 1, 1 } })
    Name (_PPC, 0)
  }
  Scope (\_SB.CPUS.C001) {
    Name (_CST, Package () { 2,
      Package () { ResourceTemplate () { Register (FFixedHW, 0, 0, 0) }, 1, 1, 1000 },
      Package () { ResourceTemplate () { Register (FFixedHW, 0, 0, 0) }, 1, 890, 100 } })
  }
}
