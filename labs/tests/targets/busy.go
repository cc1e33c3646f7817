// A busy program in Go: goroutines compute on their own memory and check it, until standard input closes.
package main

import (
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

func deep(n uint64) uint64 {
	var here [16]uint64
	for i := range here {
		here[i] = n*31 + uint64(i)
	}
	below := uint64(0)
	if n > 0 {
		below = deep(n - 1)
	}
	for i := range here {
		if here[i] != n*31+uint64(i) {
			panic("the stack")
		}
	}
	return below + here[n%16]
}

func work(number uint64, stop *atomic.Bool, rounds *atomic.Uint64) {
	memory := make([]uint64, 1<<18)
	expected := deep(100)
	for round := uint64(1); !stop.Load(); round++ {
		for i := range memory {
			if round > 1 && memory[i] != (number<<32|(round-1))*uint64(i+1) {
				panic("memory")
			}
			memory[i] = (number<<32 | round) * uint64(i+1)
		}
		if deep(100) != expected {
			panic("arithmetic")
		}
		begun := time.Now()
		time.Sleep(time.Millisecond)
		if time.Since(begun) < time.Millisecond {
			panic("a sleep")
		}
		rounds.Add(1)
	}
}

func main() {
	var stop atomic.Bool
	var rounds atomic.Uint64
	var workers sync.WaitGroup
	for number := range uint64(4) {
		workers.Add(1)
		go func() {
			work(number, &stop, &rounds)
			workers.Done()
		}()
	}
	fmt.Println("READY")
	io.Copy(io.Discard, os.Stdin)
	stop.Store(true)
	workers.Wait()
	fmt.Println(rounds.Load(), "rounds, all right")
}
